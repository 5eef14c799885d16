#include "checkpoint/format/pickle/pickle.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace fsdp::testing {
namespace {

using internal::checkpoint::Pickle;
using internal::checkpoint::Pickled;

const Pickled& only_item(const Pickle& pickle) { return *pickle.root()->items.at(0); }

TEST(Pickles, IntegersOfAnySizeAreValues) {
  // [2 ** 63], [-(2 ** 32)] and, as Python 2 wrote it, [12345678901234567890, True].
  const auto huge = Pickle::parse(std::string("\x80\x02]\x8a\x09\0\0\0\0\0\0\0\x80\0a.", 16), "p");
  ASSERT_TRUE(huge.ok()) << huge.status();
  EXPECT_EQ(only_item(*huge).kind, Pickled::Kind::kLong);
  const auto negative = Pickle::parse(std::string("]\x8a\x05\0\0\0\0\xff"
                                                  "a.",
                                                  10),
                                      "p");
  ASSERT_TRUE(negative.ok()) << negative.status();
  EXPECT_EQ(only_item(*negative).integer, -(int64_t{1} << 32));
  const auto digits = Pickle::parse("(lp0\nL12345678901234567890L\naI01\na.", "p");
  ASSERT_TRUE(digits.ok()) << digits.status();
  EXPECT_EQ(digits->root()->items.at(0)->text, "12345678901234567890");
  EXPECT_EQ(digits->root()->items.at(1)->kind, Pickled::Kind::kBool);
}

TEST(Pickles, OneThatIsCutOffSaysSoAndBytesBehindItAreLeft) {
  const auto whole = Pickle::parse("]q\1.rest", "p");
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->bytes(), 4);
  EXPECT_TRUE(absl::IsOutOfRange(Pickle::parse("]q", "p").status()));
  EXPECT_TRUE(absl::IsDataLoss(Pickle::parse("]\xff.", "p").status()));
}

}  // namespace
}  // namespace fsdp::testing
