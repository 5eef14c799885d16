#include "checkpoint/format/pickle/pickle_stack.h"

#include <stdexcept>

namespace fsdp::internal::checkpoint {
namespace {

constexpr size_t kMostValues = size_t{1} << 24;
constexpr size_t kMostCopiedBytes = size_t{1} << 28;

}  // namespace

Pickled* PickleStack::make(Pickled&& value) {
  if (values_.size() == kMostValues) throw std::runtime_error("it holds too much");
  return &values_.emplace_back(std::move(value));
}

Pickled* PickleStack::top() const {
  if (stack_.empty() || stack_.back() == nullptr) throw std::runtime_error("a value is missing");
  return stack_.back();
}

Pickled* PickleStack::pop() {
  Pickled* const value = top();
  stack_.pop_back();
  return value;
}

std::vector<const Pickled*> PickleStack::pop_some(size_t count) {
  std::vector<const Pickled*> values(count);
  while (count > 0) values[--count] = pop();
  return values;
}

std::vector<const Pickled*> PickleStack::pop_to_mark() {
  size_t mark = stack_.size();
  while (mark > 0 && stack_[mark - 1] != nullptr) --mark;
  if (mark == 0) throw std::runtime_error("a mark is missing");
  const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(mark);
  std::vector<const Pickled*> values(first, stack_.end());
  stack_.resize(mark - 1);
  return values;
}

void PickleStack::drop() {
  if (stack_.empty()) throw std::runtime_error("a value is missing");
  stack_.pop_back();
}

void PickleStack::recall(size_t index) {
  const auto found = memo_.find(index);
  if (found == memo_.end()) throw std::runtime_error("a value is recalled that was not kept");
  stack_.push_back(found->second);
}

void PickleStack::count_copied(size_t bytes) {
  copied_bytes_ += bytes;
  if (copied_bytes_ > kMostCopiedBytes) throw std::runtime_error("it holds too much");
}

}  // namespace fsdp::internal::checkpoint
