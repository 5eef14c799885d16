// Dtypes that collective backends do not know travel as bytes, or in a wider one.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::whole;

at::Tensor counted(at::ScalarType dtype) {
  return at::arange(20, at::kFloat).view({5, 4}).to(dtype);
}

bool same_bytes(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() &&
         one.contiguous().view(at::kByte).equal(other.contiguous().view(at::kByte));
}

constexpr at::ScalarType kRare[] = {at::kShort,  at::kUInt16,        at::kUInt32,
                                    at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2};

TEST(RareDtypes, MoveBetweenRanks) {
  for (int64_t world : {2, 3}) {
    run_ranks(world, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {world});
      for (const auto dtype : kRare) {
        const at::Tensor plain = counted(dtype);
        for (const int64_t dim : {0, 1}) {
          const DTensor cut = distribute_tensor(plain, mesh, {Shard{dim}});
          EXPECT_TRUE(same_bytes(whole(cut), plain)) << dtype;
          EXPECT_TRUE(same_bytes(whole(cut.redistribute({Shard{1 - dim}})), plain)) << dtype;
        }
      }
    });
  }
}

TEST(RareDtypes, AreAddedUpOrRefusedByNameAndTheGroupLivesOn) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    for (const auto dtype : {at::kShort, at::kUInt16, at::kUInt32}) {
      const DTensor terms = from_local(counted(dtype), mesh, {Partial{}});
      const at::Tensor sum = counted(at::kLong).mul(2).to(dtype);
      EXPECT_TRUE(same_bytes(whole(terms), sum)) << dtype;
      EXPECT_TRUE(same_bytes(whole(terms.redistribute({Shard{0}})), sum)) << dtype;
    }
    const at::Tensor wraps = at::full({3}, 30000, at::kShort);
    EXPECT_TRUE(whole(from_local(wraps, mesh, {Partial{}})).equal(wraps.add(wraps)));
    for (const auto dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt64}) {
      const DTensor terms = from_local(counted(dtype), mesh, {Partial{}});
      EXPECT_THAT(error_of([&] { whole(terms); }), HasSubstr(toString(dtype)));
      EXPECT_THAT(error_of([&] { terms.redistribute({Shard{0}}); }),
                  HasSubstr("can not be reduced"));
    }
    EXPECT_TRUE(whole(from_local(at::ones({2}), mesh, {Partial{}})).equal(at::full({2}, 2.0)))
        << rank;
  });
}

}  // namespace
}  // namespace fsdp
