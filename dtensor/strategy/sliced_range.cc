#include "dtensor/strategy/sliced_range.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fsdp::internal {

std::optional<Range> sliced_range(const OpSchema& call) {
  const Operand& self = call.operands[0];
  const int64_t size = self.size(wrapped_dim(call.number(1), self.ndim()));
  const auto position = [&](size_t place, int64_t otherwise) {
    const auto* const given = std::get_if<int64_t>(&call.plain[place]);
    if (given == nullptr) return otherwise;
    return std::clamp<int64_t>(*given < 0 ? *given + size : *given, 0, size);
  };
  const int64_t start = position(2, 0);
  const int64_t end = std::max(position(3, size), start);
  if (call.number(4) != 1 && end - start > 1) return std::nullopt;
  return Range{.start = start, .length = end - start};
}

}  // namespace fsdp::internal
