#include "checkpoint/format/json.h"

#include "tests/checkpoint/seconds_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace fsdp::testing {
namespace {

using internal::checkpoint::parse_json;
using ::testing::HasSubstr;

std::string error_of(const absl::Status& status) { return std::string(status.message()); }

TEST(StrictJson, ARepeatedKeyIsRefusedAtAnyDepth) {
  EXPECT_THAT(error_of(parse_json(R"({"a": {"b": 1, "c": 2, "b": 3}})", "text").status()),
              HasSubstr("text: key 'b' stands there twice"));
  EXPECT_TRUE(parse_json(R"({"a": {"b": 1}, "b": [{"a": 1}, {"a": 2}]})", "text").ok());
  EXPECT_THAT(error_of(parse_json(R"({"a": )", "text").status()), HasSubstr("text: not JSON"));
}

TEST(StrictJson, NestingWithoutEndIsRefused) {
  EXPECT_THAT(error_of(parse_json(std::string(1'000'000, '['), "text").status()),
              HasSubstr("nested too deep"));
  const auto nested = [](size_t levels) {
    return parse_json(std::string(levels, '[') + std::string(levels, ']'), "text");
  };
  EXPECT_TRUE(nested(100).ok());
  EXPECT_FALSE(nested(101).ok());
}

// Eight times the objects take eight times as long; it was 64.
TEST(StrictJson, TimeGrowsWithTheNumberOfObjectsNotItsSquare) {
  const auto text_of = [](int count) {
    std::string text = "{";
    for (int i = 0; i < count; ++i) {
      text += (i ? ", \"" : "\"") + std::to_string(i) + R"(": {"shape": [1], "dtype": "F32"})";
    }
    return text + "}";
  };
  const std::string few = text_of(4000), many = text_of(32000);
  const auto parse = [](const std::string& text) { EXPECT_TRUE(parse_json(text, "text").ok()); };
  double least_few = 1e9, least_many = 1e9;
  for (int round = 0; round < 3; ++round) {
    least_few = std::min(least_few, seconds_of([&] { parse(few); }));
    least_many = std::min(least_many, seconds_of([&] { parse(many); }));
  }
  EXPECT_LT(least_many, 24 * least_few);
}

}  // namespace
}  // namespace fsdp::testing
