// Numbers of 8 and 4 bits: each format against its definition, in double and one value at
// a time; special values; and the same bits by LibTorch's operators, as on devices.
#include "fully_shard/codecs/number_formats.h"

#include "fully_shard/codecs/codes_on_devices.h"
#include "fully_shard/gather_codec.h"

#include <c10/util/Float8_e4m3fn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::Fp8Rows;
using internal::Mxfp8;
using internal::Mxfp8Block;
using internal::Mxint8;
using internal::Mxint8Block;
using internal::Nf4;

using internal::kInfinity;
using internal::kNaN;

template <class Format>
std::vector<uint8_t> encoded(const std::vector<float>& values) {
  const auto n = static_cast<int64_t>(values.size());
  std::vector<uint8_t> codes(static_cast<size_t>(Format::row_bytes(n)), 0xab);
  Format::encode(values.data(), n, codes.data());
  return codes;
}

template <class Format>
std::vector<float> there_and_back(const std::vector<float>& values) {
  std::vector<float> back(values.size(), -7);
  Format::decode(encoded<Format>(values).data(), static_cast<int64_t>(values.size()), back.data());
  return back;
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

std::vector<float> normal(int64_t n, float scale = 0.02f) {
  const auto drawn = at::randn({n}, at::detail::createCPUGenerator(3)) * scale;
  return {drawn.const_data_ptr<float>(), drawn.const_data_ptr<float>() + n};
}

TEST(E4m3, HasTheValuesOfTheSpecification) {
  for (int code = 0; code < 256; ++code)
    EXPECT_TRUE(same(internal::kE4m3[static_cast<size_t>(code)],
                     static_cast<float>(c10::Float8_e4m3fn(static_cast<uint8_t>(code),
                                                           c10::Float8_e4m3fn::from_bits()))))
        << code;
}

TEST(E4m3, RoundsToTheNearestAndTiesToEven) {
  // Floats at equal distances, and each code and each tie.
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 97 * 64) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    const auto expected = c10::Float8_e4m3fn(std::min(std::max(value, -448.0f), 448.0f)).x;
    ASSERT_EQ(internal::to_e4m3(value), std::isnan(value) ? expected | 0x7f : expected) << value;
  }
  for (uint8_t code = 0; code < 0x7e; ++code) {
    const float low = internal::kE4m3[code], high = internal::kE4m3[code + 1u];
    const float tie = (low + high) / 2;
    EXPECT_EQ(internal::to_e4m3(low), code);
    EXPECT_EQ(internal::to_e4m3(-low), code | 0x80);
    EXPECT_EQ(internal::to_e4m3(tie), code % 2 == 0 ? code : code + 1) << tie;
    EXPECT_EQ(internal::to_e4m3(std::nextafter(tie, 0.0f)), code);
    EXPECT_EQ(internal::to_e4m3(std::nextafter(tie, 999.0f)), code + 1);
  }
  EXPECT_EQ(internal::to_e4m3(1e30f), 0x7e);
  EXPECT_EQ(internal::to_e4m3(-kInfinity), 0xfe);
}

// Section 6.3 of the OCP specification: the scale is the power of two of the largest
// value, divided by that of the largest number of the format.
std::vector<float> by_definition(const std::vector<float>& values, int largest_exponent,
                                 double (*round)(double)) {
  std::vector<float> back;
  for (size_t begin = 0; begin < values.size(); begin += 32) {
    const auto end = std::min(begin + 32, values.size());
    double largest = 0;
    for (auto i = begin; i < end; ++i) largest = std::max(largest, std::abs(double{values[i]}));
    const int exponent = largest == 0 ? -127 : static_cast<int>(std::floor(std::log2(largest)));
    const double scale = std::ldexp(1.0, std::max(exponent - largest_exponent, -127));
    for (auto i = begin; i < end; ++i)
      back.push_back(static_cast<float>(round(values[i] / scale) * scale));
  }
  return back;
}

double to_e4m3_in_double(double value) {
  const double magnitude = std::min(std::abs(value), 448.0);
  const int exponent =
      magnitude == 0 ? -6 : std::max(static_cast<int>(std::floor(std::log2(magnitude))), -6);
  const double step = std::ldexp(1.0, exponent - 3);
  return std::copysign(std::nearbyint(magnitude / step) * step, value);
}

double to_sixtyfourths(double value) {
  return std::min(std::max(std::nearbyint(value * 64), -127.0), 127.0) / 64;
}

std::vector<std::vector<float>> rows_to_try() {
  std::vector<std::vector<float>> rows;
  for (const int64_t n : {1, 2, 31, 32, 33, 64, 65, 100, 255, 4096 + 17})
    for (const float scale : {1e-44f, 1e-38f, 1e-30f, 0.02f, 1.0f, 1e20f, 8e37f})
      rows.push_back(normal(n, scale));
  rows.push_back(std::vector<float>(70, 0.0f));
  rows.push_back({std::numeric_limits<float>::max(), -1, 1e-45f});
  return rows;
}

TEST(Mxfp8, IsWhatTheSpecificationDefines) {
  for (const auto& row : rows_to_try())
    EXPECT_EQ(there_and_back<Mxfp8>(row), by_definition(row, 8, to_e4m3_in_double)) << row.size();
}

TEST(Mxint8, IsWhatTheSpecificationDefines) {
  for (const auto& row : rows_to_try())
    EXPECT_EQ(there_and_back<Mxint8>(row), by_definition(row, 0, to_sixtyfourths)) << row.size();
}

TEST(Fp8Rows, AreMultiplesOfTheLargestValuesShare) {
  for (const auto& row : rows_to_try()) {
    float largest = 0;
    for (const auto value : row) largest = std::max(largest, std::abs(value));
    const auto scale = std::max(largest / 448.0f, std::numeric_limits<float>::min());
    const auto back = there_and_back<Fp8Rows>(row);
    for (size_t i = 0; i < row.size(); ++i)
      EXPECT_EQ(back[i], static_cast<float>(to_e4m3_in_double(row[i] / scale)) * scale);
  }
}

TEST(Nf4, TakesTheNearestQuantile) {
  for (const auto& row : rows_to_try()) {
    const auto codes = encoded<Nf4>(row);
    for (size_t i = 0; i < row.size(); ++i) {
      float largest = 0;
      const auto begin = i / 64 * 64;
      for (auto j = begin; j < std::min(begin + 64, row.size()); ++j)
        largest = std::max(largest, std::abs(row[j]));
      const int code = i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
      const float value = largest == 0 ? 0 : row[i] / largest;
      for (const auto other : internal::kNf4) {
        EXPECT_LE(std::abs(value - internal::kNf4[static_cast<size_t>(code)]),
                  std::abs(value - other) + 1e-7f);
      }
    }
  }
}

TEST(Nf4, ScalesAreWithinASixteenthOfTheirDistanceFromTheMean) {
  auto row = normal(64 * 300);
  for (int64_t block = 0; block < 300; ++block)
    row[static_cast<size_t>(block) * 64] = 0.1f + 0.001f * static_cast<float>(block);
  const auto back = there_and_back<Nf4>(row);
  for (int64_t block = 0; block < 300; ++block) {
    const auto first = block < 256 ? 0 : 256, last = block < 256 ? 255 : 299;
    const auto mean = 0.1f + 0.0005f * static_cast<float>(first + last);
    const auto scale = row[static_cast<size_t>(block) * 64];
    EXPECT_NEAR(back[static_cast<size_t>(block) * 64], scale, std::abs(scale - mean) / 16 + 1e-4f);
  }
}

template <class Format>
double relative_error() {
  const auto row = normal(1 << 16);
  const auto back = there_and_back<Format>(row);
  double error = 0, size = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    error += std::pow(row[i] - back[i], 2);
    size += std::pow(row[i], 2);
  }
  return std::sqrt(error / size);
}

TEST(NumberFormats, HaveTheErrorsAndSizesThatTheHeaderStates) {
  EXPECT_NEAR(relative_error<Mxfp8>(), 0.029, 0.0005);
  EXPECT_NEAR(relative_error<Mxint8>(), 0.0076, 0.0005);
  EXPECT_NEAR(relative_error<Fp8Rows>(), 0.0265, 0.0005);
  EXPECT_NEAR(relative_error<Nf4>(), 0.092, 0.001);
  EXPECT_EQ(Mxfp8::row_bytes(4096), 4096 + 128);
  EXPECT_EQ(Mxint8::row_bytes(33), 33 + 2);
  EXPECT_EQ(Fp8Rows::row_bytes(100), 104);
  EXPECT_EQ(Nf4::row_bytes(16384), 8192 + 256 + 8);
  EXPECT_EQ(Nf4::row_bytes(16385), 8193 + 257 + 16);
}

template <class Format>
void expect_special_values_arrive() {
  for (const auto& special :
       {std::vector<float>{kInfinity}, {-kInfinity}, {kNaN}, {kInfinity, kNaN, -kInfinity}}) {
    for (const size_t place : {size_t{0}, size_t{31}, size_t{40}, size_t{127}}) {
      auto row = normal(130);
      const bool has_infinity = !std::isnan(special[0]);
      for (size_t i = 0; i < special.size(); ++i) row[place + i] = special[i];
      const auto back = there_and_back<Format>(row);
      for (size_t i = 0; i < row.size(); ++i) {
        if (!std::isfinite(row[i])) {
          EXPECT_TRUE(same(back[i], row[i])) << i << ": " << back[i];
        } else {
          EXPECT_TRUE(std::isfinite(back[i]) || (!has_infinity && std::isnan(back[i]))) << i;
        }
      }
    }
  }
}

TEST(NumberFormats, WhatIsNotFiniteArrivesAsItIs) {
  expect_special_values_arrive<Mxfp8>();
  expect_special_values_arrive<Mxint8>();
  expect_special_values_arrive<Fp8Rows>();
  expect_special_values_arrive<Nf4>();
}

// What is sent twice is not worn down.
TEST(NumberFormats, WhatWasDecodedIsTheSameWhenItIsEncodedAgain) {
  for (const auto& row : rows_to_try()) {
    const auto once = there_and_back<Mxfp8>(row), ints = there_and_back<Mxint8>(row);
    EXPECT_EQ(there_and_back<Mxfp8>(once), once);
    EXPECT_EQ(there_and_back<Mxint8>(ints), ints);
  }
}

TEST(Mxint8, RoundedAtRandomHasTheValueAsItsMean) {
  std::vector<float> values;
  for (int i = 0; i < 32; ++i) values.push_back(0.0137f * static_cast<float>(i) - 0.2f);
  values[5] = 1.999f;  // to the nearest it would be cut off
  constexpr int kDraws = 20000;
  std::vector<double> sums(32, 0), squares(32, 0);
  at::mt19937 generator(7);
  for (int draw = 0; draw < kDraws; ++draw) {
    uint8_t codes[32];
    float back[32];
    const auto scale = Mxint8Block::encode_at_random(
        values.data(), codes, [&](int64_t) { return static_cast<uint32_t>(generator()); });
    Mxint8Block::decode_block(codes, scale, back);
    for (size_t i = 0; i < 32; ++i) {
      sums[i] += back[i];
      EXPECT_LT(std::abs(back[i] - values[i]), 1.0f / 32);
    }
  }
  // Six standard deviations of the mean, of steps of 1/32.
  for (size_t i = 0; i < 32; ++i)
    EXPECT_NEAR(sums[i] / kDraws, values[i], 6 * (1.0 / 64) / std::sqrt(kDraws)) << i;
}

// `OnDevices`, by LibTorch's operators, has the bits of `Format`.
template <class Format, class OnDevices>
void expect_same_bits() {
  auto rows = rows_to_try();
  auto special = normal(130);
  special[3] = kInfinity, special[40] = kNaN, special[100] = -kInfinity, special[101] = kNaN;
  rows.push_back(special);
  for (const auto& row : rows) {
    const auto n = static_cast<int64_t>(row.size());
    const auto values = torch::tensor(row).view({1, n}).repeat({3, 1});
    const auto codes = torch::full({3, Format::row_bytes(n)}, 7, at::kByte);
    OnDevices::encode(values, codes);
    const auto expected = encoded<Format>(row);
    const auto back = there_and_back<Format>(row);
    const auto decoded = torch::zeros_like(values);
    OnDevices::decode(codes, decoded);
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t j = 0; j < codes.size(1); ++j)
        ASSERT_EQ(codes[i][j].template item<int>(), expected[static_cast<size_t>(j)])
            << n << " " << j;
      for (int64_t j = 0; j < n; ++j)
        ASSERT_TRUE(same(decoded[i][j].template item<float>(), back[static_cast<size_t>(j)]))
            << n << " " << j;
    }
  }
}

TEST(CodesOnDevices, HaveTheBitsOfThoseOnTheCpu) {
  expect_same_bits<Mxfp8, internal::Mxfp8OnDevices>();
  expect_same_bits<Mxint8, internal::Mxint8OnDevices>();
  expect_same_bits<Fp8Rows, internal::Fp8RowsOnDevices>();
  expect_same_bits<Nf4, internal::Nf4OnDevices>();
}

TEST(CodesOnDevices, HaveTheSameBitsRoundedAtRandom) {
  for (const int64_t n : {32, 130}) {
    const auto values = torch::randn({5, n});
    const auto expected = torch::zeros({5, Mxint8::row_bytes(n)}, at::kByte);
    const auto codes = torch::zeros_like(expected);
    for (const uint64_t seed : {uint64_t{0}, uint64_t{7} << 40, (uint64_t{1} << 63) + 5}) {
      mxint8()->encode_at_random(values, expected, seed);
      internal::Mxint8OnDevices::encode_at_random(values, codes, seed);
      EXPECT_TRUE(codes.equal(expected)) << n << " " << seed;
    }
  }
}

// Scales near the largest float, whose quantised ones may be beyond it.
TEST(Nf4, FiniteValuesStayFinite) {
  std::vector<float> values(64 * 256, 3.0e38f);
  for (size_t i = 0; i < values.size(); i += 64) values[i] = 0;
  for (size_t i = 64; i < 128; ++i) values[i] = 3.4e38f;
  for (size_t i = 128; i < 192; ++i) values[i] = 2.9e38f;
  for (const auto value : there_and_back<Nf4>(values)) ASSERT_TRUE(std::isfinite(value));
}

}  // namespace
}  // namespace fsdp::testing
