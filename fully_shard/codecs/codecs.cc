#include "fully_shard/codecs/codes_on_devices.h"
#include "fully_shard/codecs/number_formats.h"
#include "fully_shard/gather_codec.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace fsdp {
namespace {

// Rows of values on the CPU, and their codes.
template <class Scalar, class Byte>
struct Rows {
  Scalar* values;
  Byte* codes;
  int64_t count, elements, row_bytes;

  Scalar* values_of(int64_t row) const { return values + row * elements; }
  Byte* codes_of(int64_t row) const { return codes + row * row_bytes; }
  // visit(first row, last row), from several threads.
  template <class Visit>
  void for_each_range(const Visit& visit) const {
    constexpr int64_t kValuesOfAThread = 32 << 10;  // fewer are not worth another one
    const auto at_least = std::max<int64_t>(kValuesOfAThread / std::max<int64_t>(elements, 1), 1);
    at::parallel_for(0, count, at_least, visit);
  }
};

// encode(values, n, codes, row) of each row, which takes floats.
template <class Scalar, class Encode>
void encode_rows(const Rows<const Scalar, uint8_t>& rows, const Encode& encode) {
  rows.for_each_range([&](int64_t begin, int64_t end) {
    std::vector<float> floats(std::is_same_v<Scalar, float> ? 0
                                                            : static_cast<size_t>(rows.elements));
    for (int64_t row = begin; row < end; ++row) {
      const auto* const values = rows.values_of(row);
      if constexpr (std::is_same_v<Scalar, float>) {
        encode(values, rows.elements, rows.codes_of(row), row);
      } else {
        std::transform(values, values + rows.elements, floats.begin(),
                       [](Scalar value) { return static_cast<float>(value); });
        encode(floats.data(), rows.elements, rows.codes_of(row), row);
      }
    }
  });
}

template <class Format, class Scalar>
void decode_rows(const Rows<Scalar, const uint8_t>& rows) {
  rows.for_each_range([&](int64_t begin, int64_t end) {
    std::vector<float> floats(std::is_same_v<Scalar, float> ? 0
                                                            : static_cast<size_t>(rows.elements));
    for (int64_t row = begin; row < end; ++row) {
      auto* const values = rows.values_of(row);
      if constexpr (std::is_same_v<Scalar, float>) {
        Format::decode(rows.codes_of(row), rows.elements, values);
      } else {
        Format::decode(rows.codes_of(row), rows.elements, floats.data());
        std::transform(floats.begin(), floats.end(), values,
                       [](float value) { return static_cast<Scalar>(value); });
      }
    }
  });
}

template <class Encode>
void encode_on_cpu(const at::Tensor& values, const at::Tensor& codes, const Encode& encode) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values.scalar_type(), "encode", [&] {
    encode_rows<scalar_t>({values.const_data_ptr<scalar_t>(), codes.mutable_data_ptr<uint8_t>(),
                           values.size(0), values.size(1), codes.size(1)},
                          encode);
  });
}

template <class Format>
void decode_on_cpu(const at::Tensor& codes, const at::Tensor& values) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values.scalar_type(), "decode", [&] {
    decode_rows<Format, scalar_t>({values.mutable_data_ptr<scalar_t>(),
                                   codes.const_data_ptr<uint8_t>(), values.size(0), values.size(1),
                                   codes.size(1)});
  });
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
