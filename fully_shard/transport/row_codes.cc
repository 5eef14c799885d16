#include "fully_shard/transport/row_codes.h"

#include "fully_shard/transport/codec_failure.h"
#include "fully_shard/transport/packed_layout.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// Numbers are drawn for places: seeds are below 2^63 (ReduceSettings::next_seed), a row
// has fewer than 2^40 elements, and second steps of all-reduces have the upper half.
uint64_t seed_of_row(uint64_t seed, int64_t rank) {
  return seed + (static_cast<uint64_t>(rank) << 40);
}
uint64_t seed_of_second_step(uint64_t seed) { return seed + (uint64_t{1} << 63); }

}  // namespace

RowCodes::RowCodes(std::shared_ptr<const GatherCodec> codec, at::ScalarType dtype,
                   int64_t flag_bytes, std::vector<int64_t> elements)
    : codec_(std::move(codec)),
      dtype_(dtype),
      flag_bytes_(flag_bytes),
      elements_(std::move(elements)) {
  for (const auto each : elements_) lengths_.push_back(align_up(flag_bytes_ + code_bytes(each)));
  row_bytes_ = *std::max_element(lengths_.begin(), lengths_.end());
}

template <class Visit>
void RowCodes::for_pieces(int64_t elements, const Visit& visit) const {
  const auto pieces = elements / kPiece, rest = elements % kPiece;
  const auto bytes = pieces == 0 ? 0 : pieces * codec_->row_bytes(kPiece);
  if (pieces > 0) visit(0, pieces * kPiece, 0, pieces);
  if (rest > 0) visit(pieces * kPiece, rest, bytes, 1);
}

int64_t RowCodes::code_bytes(int64_t elements) const {
  int64_t bytes = 0;
  for_pieces(elements, [&](int64_t, int64_t count, int64_t, int64_t rows) {
    bytes += rows * codec_->row_bytes(count / rows);
  });
  return bytes;
}

void RowCodes::encode_row(const at::Tensor& elements, const at::Tensor& codes,
                          uint64_t seed) const {
  for_pieces(elements.numel(), [&](int64_t first, int64_t count, int64_t byte, int64_t rows) {
    const auto values = elements.narrow(0, first, count).view({rows, -1});
    const auto row_bytes = codec_->row_bytes(count / rows);
    const auto to = codes.narrow(0, byte, rows * row_bytes).view({rows, -1});
    if (codec_->encode_at_random) {
      codec_->encode_at_random(values, to, seed + static_cast<uint64_t>(first));
    } else {
      codec_->encode(values, to);
    }
  });
}

void RowCodes::encode(const at::Tensor& rows, const at::Tensor& codes, uint64_t seed,
                      const at::Tensor& residual) const {
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    const auto row = rows[rank], to = codes[rank];
    const auto count = elements_[static_cast<size_t>(rank)];
    if (flag_bytes_ > 0) to.narrow(0, 0, flag_bytes_).copy_(row.narrow(0, 0, flag_bytes_));
    if (count == 0) continue;
    const auto elements = row.narrow(0, flag_bytes_, count * bytes_of(dtype_)).view(dtype_);
    const auto lost = residual.defined() ? residual[rank].narrow(0, 0, count) : residual;
    if (lost.defined()) elements.add_(lost);
    run_codec(*codec_, " failed to encode gradients", [&] {
      encode_row(elements, to.narrow(0, flag_bytes_, row_bytes_ - flag_bytes_),
                 seed_of_row(seed, rank));
    });
    if (lost.defined()) {
      const auto sent = decode(to, rank).narrow(0, flag_bytes_ / bytes_of(dtype_), count);
      lost.copy_(at::where(elements.isfinite().all(), elements.sub(sent), lost));
    }
  }
}

at::Tensor RowCodes::decode(const at::Tensor& codes, int64_t rank) const {
  const auto count = elements_[static_cast<size_t>(rank)];
  const auto flags = flag_bytes_ / bytes_of(dtype_);
  const auto numbers = at::empty({flags + count}, codes.options().dtype(sum_dtype(dtype_)));
  if (flags > 0) numbers.narrow(0, 0, flags).copy_(codes.narrow(0, 0, flag_bytes_).view(dtype_));
  run_codec(*codec_, " failed to decode gradients", [&] {
    for_pieces(count, [&](int64_t first, int64_t elements, int64_t byte, int64_t rows) {
      const auto row_bytes = codec_->row_bytes(elements / rows);
      codec_->decode(codes.narrow(0, flag_bytes_ + byte, rows * row_bytes).view({rows, -1}),
                     numbers.narrow(0, flags + first, elements).view({rows, -1}));
    });
  });
  return numbers;
}

Summands RowCodes::summands(int64_t rank, CodecFailure& failure) const {
  const auto decode = [codes = *this, rank, error = failure.of_decoding()](const at::Tensor& row) {
    try {
      return codes.decode(row, rank);
    } catch (const std::exception& thrown) {
      if (error->empty()) *error = text_of(thrown);
      const auto elements = codes.elements_[static_cast<size_t>(rank)];
      return at::zeros({codes.flag_bytes_ / bytes_of(codes.dtype_) + elements},
                       row.options().dtype(sum_dtype(codes.dtype_)));
    }
  };
  return Summands(dtype_, std::make_shared<Summands::Codes>(Summands::Codes{codec_->name, decode}));
}

int64_t CodedAllReduce::elements_of_piece(int64_t ranks) const {
  const auto blocks = (row.numel() - flags + ranks * RowCodes::kElementsOfABlock - 1) /
                      (ranks * RowCodes::kElementsOfABlock);
  return blocks * RowCodes::kElementsOfABlock;
}

int64_t CodedAllReduce::bytes_of_piece(int64_t ranks) const {
  const RowCodes piece(codec, row.scalar_type(), 0, {elements_of_piece(ranks)});
  return 2 * piece.row_bytes() + flags * bytes_of(row.scalar_type());
}

namespace {

// Flags before each piece of the row, padded with zeros: uint8 [ranks, bytes].
at::Tensor pieces_with_flags(const CodedAllReduce& of, int64_t ranks) {
  const auto piece = of.elements_of_piece(ranks), elements = of.row.numel() - of.flags;
  const auto padded = at::zeros({ranks * piece}, of.row.options());
  padded.narrow(0, 0, elements).copy_(of.row.narrow(0, of.flags, elements));
  const auto flags = of.row.narrow(0, 0, of.flags).expand({ranks, of.flags});
  return at::cat({flags, padded.view({ranks, piece})}, 1).view(at::kByte);
}

bool can_tell(const Collectives& on, const CodedAllReduce& of) {
  return on.size() > 1 && of.row.is_cpu();
}

// The sums of all ranks, of which this rank has `own`, flags and its piece.
at::Tensor joined(const Collectives& on, const CodedAllReduce& of, const at::Tensor& own,
                  const AllReduceOptions& options) {
  const auto piece = own.numel() - of.flags;
  const RowCodes codes(of.codec, own.scalar_type(), 0, {piece});
  const auto sums = own.narrow(0, of.flags, piece).view(at::kByte).view({1, -1});
  const auto sent = at::empty({1, codes.row_bytes()}, sums.options());
  const auto lost = of.residual.defined() ? at::zeros({1, piece}, own.options()) : at::Tensor();
  CodecFailure failure;
  failure.keep(can_tell(on, of),
               [&] { codes.encode(sums, sent, seed_of_second_step(of.seed), lost); });
  if (lost.defined()) of.residual[on.rank()].add_(lost[0]);
  const auto what = "all-gather of the sums of the " + options.what;
  const auto rows =
      on
          .start(AllGatherOptions{
              .input = sent[0], .what = what, .unit = options.unit, .words = failure.words({})})
          .wait();
  failure.check(rows.words(), on, what);
  auto row = at::empty({of.flags + on.size() * piece}, own.options());
  row.narrow(0, 0, of.flags).copy_(own.narrow(0, 0, of.flags));
  for (int64_t rank = 0; rank < on.size(); ++rank) {
    const auto of_rank =
        at::from_blob(const_cast<char*>(rows.row(rank)), {codes.row_bytes()}, sent.options());
    row.narrow(0, of.flags + rank * piece, piece).copy_(codes.decode(of_rank, 0));
  }
  return row.narrow(0, 0, of.row.numel());
}

}  // namespace

InFlight<SummedRow> start_coded_all_reduce(const Collectives& on, const CodedAllReduce& all_reduce,
                                           const AllReduceOptions& options) {
  const auto ranks = on.size();
  const auto dtype = all_reduce.row.scalar_type();
  const RowCodes codes(
      all_reduce.codec, dtype, all_reduce.flags * bytes_of(dtype),
      std::vector<int64_t>(static_cast<size_t>(ranks), all_reduce.elements_of_piece(ranks)));
  const auto sent = on.row_memory({ranks, codes.row_bytes()}, all_reduce.row.device());
  CodecFailure failure;
  failure.keep(can_tell(on, all_reduce), [&] {
    codes.encode(pieces_with_flags(all_reduce, ranks), sent, all_reduce.seed, all_reduce.residual);
  });
  const auto sums = std::make_shared<InFlight<SummedRow>>(
      on.start(ReduceScatterOptions{.input = sent,
                                    .summands = codes.summands(on.rank(), failure),
                                    .what = options.what,
                                    .unit = options.unit,
                                    .words = failure.words(options.words)}));
  const auto finish = [on, sums, all_reduce, options, failure] {
    auto own = sums->wait();
    failure.check(own.words, on, options.what);
    return SummedRow{joined(on, all_reduce, own.row, options), std::move(own.words)};
  };
  return InFlight<SummedRow>(finish, sums->staging_bytes());
}

}  // namespace fsdp::internal
