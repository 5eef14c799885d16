#include "deferred_init/tape.h"

namespace fsdp::internal {

std::shared_ptr<Tape> Tape::current() {
  thread_local std::weak_ptr<Tape> last;
  auto tape = last.lock();
  if (!tape) {
    tape = std::make_shared<Tape>();
    last = tape;
  }
  return tape;
}

int64_t Tape::new_value(int64_t nbytes) {
  nbytes_.push_back(nbytes);
  return static_cast<int64_t>(nbytes_.size()) - 1;
}

void Tape::add(Step step, std::vector<int64_t> reads, const std::vector<int64_t>& writes) {
  steps_.push_back(std::move(step));
  dependencies_.add(std::move(reads), writes);
}

}  // namespace fsdp::internal
