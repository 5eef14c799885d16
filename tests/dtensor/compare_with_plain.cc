#include "tests/dtensor/compare_with_plain.h"

#include "tests/dtensor/partial_values.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/allclose.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp::testing {
namespace {

std::vector<std::vector<Placement>> placement_lists(const DeviceMesh& mesh) {
  std::vector<std::vector<Placement>> lists;
  if (mesh.ndim() == 1) {
    for (const auto& placement : every_placement(2)) lists.push_back({placement});
    return lists;
  }
  const Placement sum{Partial{}};
  const Placement max{Partial{Partial::Op::kMax}};
  return {{Shard{0}, Shard{0}},      {Shard{0}, Shard{1}},
          {Shard{1}, Shard{0}},      {Replicate{}, Shard{0}},
          {Shard{1}, Replicate{}},   {sum, Shard{0}},
          {Shard{0}, max},           {sum, sum},
          {Replicate{}, Replicate{}}};
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected, double tolerance) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  if (actual.sizes() != expected.sizes()) return;
  const auto type = expected.is_complex() ? at::kComplexDouble : at::kDouble;
  EXPECT_TRUE(
      at::allclose(actual.to(type), expected.to(type), tolerance, tolerance, /*equal_nan=*/true));
}

void compare(const Case& test, const at::Tensor& dtensor, const at::Tensor& plain,
             double tolerance) {
  const auto actual = test.function(dtensor);
  const auto expected = test.function(plain);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(is_dtensor(actual[i]));
    expect_equal(whole(actual[i]), expected[i], tolerance);
  }
}

}  // namespace

at::Tensor whole(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

void on_worlds(const std::function<void(const DeviceMesh&)>& body) {
  for (int64_t world = 1; world <= 3; ++world) {
    run_ranks(world, [&](int64_t) { body(init_device_mesh(c10::kCPU, {world})); });
  }
}

void on_meshes(const std::function<void(const DeviceMesh&)>& body) {
  on_worlds(body);
  run_ranks(4, [&](int64_t) { body(init_device_mesh(c10::kCPU, {2, 2})); });
}

void on_placements(const DeviceMesh& mesh,
                   const std::function<void(const at::Tensor&, const at::Tensor&)>& body) {
  for (const auto& placements : placement_lists(mesh)) {
    for (int64_t rows : {2, 5}) {
      const auto known = known_dtensor(mesh, placements, {rows, 4}, 5);
      std::string text = to_string(mesh);
      for (const auto& placement : placements) text += " " + to_string(placement);
      SCOPED_TRACE(text);
      body(known.dtensor, known.whole);
    }
  }
}

void expect_same(const std::vector<Case>& cases, double tolerance) {
  on_meshes([&](const DeviceMesh& mesh) {
    on_placements(mesh, [&](const at::Tensor& dtensor, const at::Tensor& plain) {
      for (const auto& test : cases) {
        SCOPED_TRACE(test.name);
        compare(test, dtensor, plain, tolerance);
      }
    });
  });
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace fsdp::testing
