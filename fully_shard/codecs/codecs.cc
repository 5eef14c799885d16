#include "fully_shard/codecs/codes_on_devices.h"
#include "fully_shard/codecs/number_formats.h"
#include "fully_shard/gather_codec.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace fsdp {
namespace {

// visit(first row, last row), from several threads.
template <class Visit>
void for_each_range(int64_t rows, int64_t elements, const Visit& visit) {
  constexpr int64_t kValuesOfAThread = 32 << 10;  // fewer are not worth another one
  at::parallel_for(0, rows, std::max<int64_t>(kValuesOfAThread / std::max<int64_t>(elements, 1), 1),
                   visit);
}

// encode(values, n, codes, row) of each row.
template <class Encode>
void encode_on_cpu(const at::Tensor& values, const at::Tensor& codes, const Encode& encode) {
  const auto floats = values.to(at::kFloat);
  const auto elements = values.size(1), row_bytes = codes.size(1);
  const auto* const from = floats.const_data_ptr<float>();
  auto* const to = codes.mutable_data_ptr<uint8_t>();
  for_each_range(values.size(0), elements, [&](int64_t begin, int64_t end) {
    for (auto row = begin; row < end; ++row)
      encode(from + row * elements, elements, to + row * row_bytes, row);
  });
}

template <class Format>
void decode_on_cpu(const at::Tensor& codes, const at::Tensor& values) {
  const bool is_float = values.scalar_type() == at::kFloat;
  const auto floats = is_float ? values : at::empty_like(values, at::kFloat);
  const auto elements = values.size(1), row_bytes = codes.size(1);
  const auto* const from = codes.const_data_ptr<uint8_t>();
  auto* const to = floats.mutable_data_ptr<float>();
  for_each_range(values.size(0), elements, [&](int64_t begin, int64_t end) {
    for (auto row = begin; row < end; ++row)
      Format::decode(from + row * row_bytes, elements, to + row * elements);
  });
  if (!is_float) values.copy_(floats);
}

// `Format` on the CPU, `OnDevices` elsewhere; they give the same bits.
template <class Format, class OnDevices>
std::shared_ptr<GatherCodec> codec_of(const std::string& name) {
  auto codec = std::make_shared<GatherCodec>();
  codec->name = name;
  codec->row_bytes = Format::row_bytes;
  codec->encode = [](const at::Tensor& values, const at::Tensor& codes) {
    if (!values.is_cpu()) return OnDevices::encode(values, codes);
    encode_on_cpu(values, codes, [](const float* row, int64_t n, uint8_t* to, int64_t) {
      Format::encode(row, n, to);
    });
  };
  codec->decode = [](const at::Tensor& codes, const at::Tensor& values) {
    values.is_cpu() ? decode_on_cpu<Format>(codes, values) : OnDevices::decode(codes, values);
  };
  return codec;
}

}  // namespace

std::shared_ptr<const GatherCodec> mxfp8() {
  return codec_of<internal::Mxfp8, internal::Mxfp8OnDevices>("MXFP8");
}

std::shared_ptr<const GatherCodec> mxint8() {
  using internal::Mxint8;
  using internal::Mxint8OnDevices;
  const auto codec = codec_of<Mxint8, Mxint8OnDevices>("MXINT8");
  codec->encode_at_random = [](const at::Tensor& values, const at::Tensor& codes, uint64_t seed) {
    if (!values.is_cpu()) return Mxint8OnDevices::encode_at_random(values, codes, seed);
    encode_on_cpu(values, codes, [seed](const float* row, int64_t n, uint8_t* to, int64_t number) {
      Mxint8::encode_at_random(row, n, to, seed + static_cast<uint64_t>(number * n));
    });
  };
  return codec;
}

std::shared_ptr<const GatherCodec> fp8_rows() {
  return codec_of<internal::Fp8Rows, internal::Fp8RowsOnDevices>("FP8 rows");
}

std::shared_ptr<const GatherCodec> nf4() {
  return codec_of<internal::Nf4, internal::Nf4OnDevices>("NF4");
}

}  // namespace fsdp
