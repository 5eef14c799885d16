// The rows of a reduction as codes (GatherCodec): encoded where they are sent, decoded
// and added in the order of the ranks, in sum_dtype(), where they arrive. Flags at the
// beginning of a row stay what they are. A row is encoded in pieces, so that a scale is
// of a few thousand gradients at most. Local.
//
//   row          | flags | elements ...                     |     of `dtype`
//   what is sent | flags | codes of 4096 | codes of 4096 ...|
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/operations.h"
#include "fully_shard/gather_codec.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

class CodecFailure;

class RowCodes {
 public:
  static constexpr int64_t kPiece = 4096;  // elements
  // Parameters begin at multiples of it, so that blocks of up to so many values have
  // gradients of one parameter.
  static constexpr int64_t kElementsOfABlock = 64;

  // Of one row for each rank, of flags in so many bytes and of elements[rank] elements.
  RowCodes(std::shared_ptr<const GatherCodec> codec, at::ScalarType dtype, int64_t flag_bytes,
           std::vector<int64_t> elements);

  int64_t row_bytes() const { return row_bytes_; }  // of the longest
  // How many bytes at the start of each row are used.
  const std::vector<int64_t>& lengths() const { return lengths_; }

  // `rows`: uint8 [ranks, bytes]; to `codes`: uint8 [ranks, row_bytes()]. Where the codec
  // can, rounded at random, by `seed`. residual: with error feedback, [ranks, elements]
  // of the dtype, which is added to the rows and becomes what was lost; else undefined. A
  // row with values that are not finite leaves it as it was. Throws what the codec
  // throws, with its name.
  void encode(const at::Tensor& rows, const at::Tensor& codes, uint64_t seed,
              const at::Tensor& residual = {}) const;
  // Of one row of codes, that of `rank`: flags and elements, [numbers] of sum_dtype().
  // Throws what the codec throws, with its name.
  at::Tensor decode(const at::Tensor& codes, int64_t rank) const;
  // What is sent, as `rank` adds it up. What decoding throws is kept in `failure`; the
  // sum has no meaning then.
  Summands summands(int64_t rank, CodecFailure& failure) const;

 private:
  int64_t code_bytes(int64_t elements) const;
  // visit(first element, elements, first byte of their codes, rows of a codec)
  template <class Visit>
  void for_pieces(int64_t elements, const Visit& visit) const;
  void encode_row(const at::Tensor& elements, const at::Tensor& codes, uint64_t seed) const;

  std::shared_ptr<const GatherCodec> codec_;
  at::ScalarType dtype_;
  int64_t flag_bytes_;
  std::vector<int64_t> elements_;
  std::vector<int64_t> lengths_;
  int64_t row_bytes_ = 0;
};

// An all-reduce of codes: each rank adds up a piece of the row, encodes the sum again and
// sends it to the others, so that all of them have the same bits.
struct CodedAllReduce {
  std::shared_ptr<const GatherCodec> codec;
  at::Tensor row;     // [numbers], contiguous, of the dtype of its sums
  int64_t flags = 0;  // at its beginning
  uint64_t seed = 0;
  // As encode() has it, of pieces: [ranks, elements_of_piece()]; complete once the sum
  // was waited for.
  at::Tensor residual = {};

  int64_t elements_of_piece(int64_t ranks) const;
  // Of what a rank sends to another one, in both steps.
  int64_t bytes_of_piece(int64_t ranks) const;
};

// Of options: what, unit and words. Where a codec throws on one rank, all of them throw
// when they wait, on the CPU (CodecFailure), and what it throws while it decodes is this
// rank's alone. Collective over the group.
InFlight<SummedRow> start_coded_all_reduce(const Collectives& on, const CodedAllReduce& all_reduce,
                                           const AllReduceOptions& options);

}  // namespace fsdp::internal
