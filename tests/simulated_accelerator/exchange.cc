#include "tests/simulated_accelerator/exchange.h"

#include "tests/simulated_accelerator/host_view.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <numeric>

namespace fsdp::testing::simulated {
namespace {

using Operation = c10d::ReduceOp::RedOpType;

// An operand may overlap itself: a gather's input may lie in its output.
void copy(const Operand& to, size_t to_byte, const Operand& from, size_t from_byte, size_t bytes) {
  if (to.output == nullptr || bytes == 0) return;
  TORCH_CHECK(to_byte + bytes <= to.output_bytes && from_byte + bytes <= from.input_bytes,
              "simulated accelerator: the ranks' sizes of a collective differ");
  std::memmove(to.output + to_byte, from.input + from_byte, bytes);
}

at::Tensor combined(Operation operation, const at::Tensor& a, const at::Tensor& b) {
  switch (operation) {
    case Operation::SUM:
    case Operation::AVG:
      return a.add(b);
    case Operation::PRODUCT:
      return a.mul(b);
    case Operation::MIN:
      return at::minimum(a, b);
    case Operation::MAX:
      return at::maximum(a, b);
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "simulated accelerator: reduction with operation ",
                                  static_cast<int>(operation));
  }
}

at::Tensor elements_at(const char* data, size_t bytes, at::ScalarType dtype) {
  const auto count = static_cast<int64_t>(bytes / c10::elementSize(dtype));
  return at::from_blob(const_cast<char*>(data), {count}, at::TensorOptions(dtype));
}

// Of `bytes` bytes of each input, from `offset` on.
at::Tensor reduced(const Operands& ranks, size_t offset, size_t bytes, at::ScalarType dtype,
                   Operation operation) {
  at::Tensor result;
  for (const auto& rank : ranks) {
    TORCH_CHECK(offset + bytes <= rank.input_bytes,
                "simulated accelerator: the ranks' sizes of a reduction differ");
    const auto row = elements_at(rank.input + offset, bytes, dtype);
    result = result.defined() ? combined(operation, result, row) : row.clone();
  }
  return operation == Operation::AVG ? result.div(static_cast<int64_t>(ranks.size())) : result;
}

// `row_of_rank` is how far the rows of neighbours lie apart, as a multiple of an output.
Exchange reduce(at::ScalarType dtype, Operation operation, size_t row_of_rank) {
  return [=](const Operands& ranks) {
    const PlainKernels plain;
    std::vector<at::Tensor> results;  // all before the first is stored: outputs may be inputs
    for (size_t r = 0; r < ranks.size(); ++r) {
      const auto bytes = ranks[r].output_bytes;
      results.push_back(reduced(ranks, r * row_of_rank * bytes, bytes, dtype, operation));
    }
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r].output == nullptr) continue;
      elements_at(ranks[r].output, ranks[r].output_bytes, dtype).copy_(results[r]);
    }
  };
}

}  // namespace

Exchange gather_rows() {
  return [](const Operands& ranks) {
    for (const auto& to : ranks) {
      size_t offset = 0;
      for (const auto& from : ranks) {
        copy(to, offset, from, 0, from.input_bytes);
        offset += from.input_bytes;
      }
    }
  };
}

Exchange reduce_rows(at::ScalarType dtype, Operation operation) {
  return reduce(dtype, operation, 1);
}

Exchange reduce_whole(at::ScalarType dtype, Operation operation) {
  return reduce(dtype, operation, 0);
}

Exchange exchange_parts() {
  return [](const Operands& ranks) {
    for (size_t to = 0; to < ranks.size(); ++to) {
      size_t to_byte = 0;
      for (const auto& from : ranks) {
        const auto& splits = from.input_splits;
        const auto from_byte =
            std::accumulate(splits.begin(), splits.begin() + static_cast<ptrdiff_t>(to), size_t{0});
        copy(ranks[to], to_byte, from, from_byte, splits.at(to));
        to_byte += splits.at(to);
      }
    }
  };
}

Exchange copy_from_rank(size_t root) {
  return [root](const Operands& ranks) {
    for (const auto& to : ranks) copy(to, 0, ranks.at(root), 0, to.output_bytes);
  };
}

}  // namespace fsdp::testing::simulated
