#include "dtensor/context_parallel.h"

#include <atomic>

namespace fsdp {
namespace {

std::atomic<SequenceAttention>& of_process() {
  static std::atomic<SequenceAttention> how{SequenceAttention::kCheapest};
  return how;
}

}  // namespace

void set_sequence_attention(SequenceAttention how) { of_process() = how; }

SequenceAttention sequence_attention() { return of_process(); }

}  // namespace fsdp
