#include "device_mesh/device_mesh.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <sstream>

namespace fsdp {
namespace {

using testing::run_ranks;
using Indices = std::vector<int64_t>;
using Names = std::vector<std::string>;

#define EXPECT_VALUE_ERROR(call, part)                                                          \
  do {                                                                                          \
    const std::string text = testing::message_of<c10::ValueError>([&] { (void)(call); });       \
    EXPECT_NE(text.find(part), std::string::npos) << "expected: " << part << "\ngot: " << text; \
  } while (false)

TEST(DeviceMesh, OneDimensionReusesTheDefaultGroup) {
  for (int64_t world : {1, 2, 3, 4}) {
    run_ranks(world, [&](int64_t rank) {
      const auto mesh = init_device_mesh(c10::kCPU, {world}, {"dp"});
      EXPECT_EQ(mesh.ndim(), 1);
      EXPECT_EQ(mesh.size(), world);
      EXPECT_EQ(mesh.size(-1), world);
      EXPECT_EQ(mesh.rank(), rank);
      EXPECT_EQ(mesh.local_rank(), rank);
      EXPECT_EQ(mesh.coordinate(), Indices{rank});
      EXPECT_EQ(mesh.group(), default_process_group());
      EXPECT_EQ(mesh.device_type(), c10::kCPU);
    });
  }
}

TEST(DeviceMesh, TwoDimensionsOnFourRanks) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const int64_t row = rank / 2, column = rank % 2;
    EXPECT_EQ(mesh.coordinate(), (Indices{row, column}));
    EXPECT_EQ(mesh.ranks(), (Indices{0, 1, 2, 3}));
    EXPECT_EQ(mesh.local_rank(-1), column);

    const auto dp = mesh["dp"], tp = mesh["tp"];
    EXPECT_EQ(dp.ranks(), (Indices{column, column + 2}));
    EXPECT_EQ(tp.ranks(), (Indices{2 * row, 2 * row + 1}));
    EXPECT_EQ(mesh.slice_index(), 0);
    EXPECT_EQ(tp.slice_index(), row);
    EXPECT_EQ(dp.slice_index(), column);
    EXPECT_EQ(dp.rank(), rank);
    EXPECT_EQ(dp.coordinate(), Indices{row});
    EXPECT_EQ(dp.dim_names(), Names{"dp"});
    EXPECT_EQ(dp.group(), mesh.group(0));
    EXPECT_EQ(tp.group(), mesh.group(1));
    EXPECT_EQ(internal::group_rank(dp.group()), row);
    EXPECT_EQ(internal::group_size(tp.group()), 2);

    const auto transposed = mesh[Names{"tp", "dp"}];
    EXPECT_EQ(transposed.ranks(), (Indices{0, 2, 1, 3}));
    EXPECT_EQ(transposed.coordinate(), (Indices{column, row}));
    EXPECT_EQ(transposed.group(0), mesh.group(1));
    EXPECT_EQ((mesh[Names{"dp", "tp"}]), mesh);
  });
}

TEST(DeviceMesh, DimensionsOfSizeOneHaveGroupsOfOne) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"replicate", "shard"});
    EXPECT_EQ(mesh.group(1), default_process_group());
    EXPECT_EQ(internal::group_size(mesh.group(0)), 1);
    EXPECT_EQ(mesh["replicate"].ranks(), Indices{rank});
  });
}

TEST(DeviceMesh, OfTheCpuHasADeviceWithoutIndex) {
  run_ranks(1, [](int64_t) {
    const auto device = local_device(init_device_mesh(c10::kCPU, {1}));
    EXPECT_TRUE(device.is_cpu());
    EXPECT_FALSE(device.has_index());
  });
}

TEST(DeviceMesh, SideGroupsAreMadeOnceAndSharedBySlices) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto reduce = mesh.side_group(0, "reduce");
    EXPECT_NE(reduce, mesh.group(0));
    EXPECT_EQ(internal::group_rank(reduce), internal::group_rank(mesh.group(0)));
    EXPECT_EQ(internal::group_size(reduce), 2);
    EXPECT_EQ(mesh["dp"].side_group(0, "reduce"), reduce);
    EXPECT_EQ((mesh[Names{"tp", "dp"}].side_group(1, "reduce")), reduce);
    EXPECT_NE(mesh.side_group(0, "other"), reduce);
    internal::barrier(reduce);
  });
}

TEST(DeviceMesh, MeshesOverTheWholeWorldShareItsSideGroups) {
  run_ranks(2, [](int64_t) {
    EXPECT_EQ(default_mesh().side_group(0, "reduce"),
              init_device_mesh(c10::kCPU, {2}).side_group(0, "reduce"));
    EXPECT_EQ(default_mesh(), init_device_mesh(c10::kCPU, {2}));
  });
}

TEST(DeviceMesh, TheDefaultMeshIsMadeOnceForAsLongAsItIsHeld) {
  run_ranks(2, [](int64_t) {
    const auto mesh = default_mesh();
    const auto again = default_mesh();
    EXPECT_EQ(&mesh.ranks(), &again.ranks());
  });
}

TEST(DeviceMesh, FlattenMergesDimensions) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 1, 2}, {"dp", "cp", "tp"});
    const auto flat = mesh.flatten({"dp", "cp"});
    EXPECT_EQ(flat.dim_names(), (Names{"dp_cp", "tp"}));
    EXPECT_EQ(flat.shape(), (Indices{2, 2}));
    EXPECT_EQ(flat.ranks(), mesh.ranks());
    EXPECT_EQ(flat.group(1), mesh.group(2));
    EXPECT_EQ(flat["dp_cp"].ranks(), (Indices{rank % 2, rank % 2 + 2}));
    EXPECT_EQ(internal::group_rank(flat.group(0)), rank / 2);
    EXPECT_EQ(mesh.flatten({"dp", "cp"}, "again").group(0), flat.group(0));
    EXPECT_EQ(mesh.flatten({"tp"}, "renamed").group(2), mesh.group(2));

    const auto all = mesh.flatten({"dp", "cp", "tp"}, "all");
    EXPECT_EQ(all.group(), default_process_group());
    EXPECT_EQ(all.coordinate(), Indices{rank});

    const auto reversed = mesh.flatten({"tp", "dp"});
    EXPECT_EQ(reversed.shape(), (Indices{4, 1}));
    EXPECT_EQ(reversed["tp_dp"].ranks(), (Indices{0, 2, 1, 3}));
    EXPECT_EQ(internal::group_rank(reversed.group(0)), reversed.local_rank(0));
    EXPECT_EQ(to_string(reversed["tp_dp"]), "DeviceMesh((tp_dp=4), 'cpu', stride=((1, 2),))");
  });
}

TEST(DeviceMesh, SlicesBesideEachOtherAreTheSliceOfBoth) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto both = mesh["tp"].beside(mesh["dp"]);
    const auto slice = mesh[{"tp", "dp"}];
    EXPECT_EQ(both, slice);
    EXPECT_EQ(both.coordinate(), slice.coordinate());
    for (int64_t dim = 0; dim < 2; ++dim) EXPECT_EQ(both.group(dim), slice.group(dim));
    EXPECT_VALUE_ERROR(mesh["tp"].beside(mesh["tp"]), "not different dimensions of one mesh");
    const auto other = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    EXPECT_VALUE_ERROR(mesh["tp"].beside(other["dp"]), "not different dimensions of one mesh");
  });
}

TEST(DeviceMesh, PermutedIsTheSliceInThatOrderAndNeedsNoNames) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    EXPECT_EQ(mesh.permute({1, 0}), (mesh[{"tp", "dp"}]));
    EXPECT_EQ(mesh.permute({0, 1}), mesh);
    const auto plain = init_device_mesh(c10::kCPU, {1, 4}).permute({1, 0});
    EXPECT_EQ(plain.shape(), (Indices{4, 1}));
    EXPECT_EQ(plain.ranks(), (Indices{0, 1, 2, 3}));
    EXPECT_EQ(plain.coordinate(), (Indices{plain.rank(), 0}));
    for (const Indices& dims : std::vector<Indices>{{0}, {0, 0}, {0, 2}, {-1, 0}, {0, 1, 2}})
      EXPECT_VALUE_ERROR(mesh.permute(dims), "expected each dimension");
  });
}

TEST(DeviceMesh, FromGroupTakesTheGroupAsItIs) {
  run_ranks(4, [](int64_t rank) {
    const auto grid = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto mesh = DeviceMesh::from_group(grid.group(0), c10::kCPU, {}, "dp");
    EXPECT_EQ(mesh.group(), grid.group(0));
    EXPECT_EQ(mesh.ranks(), grid["dp"].ranks());
    EXPECT_EQ(mesh.rank(), rank);
    EXPECT_EQ(mesh, grid["dp"]);
    EXPECT_EQ(internal::group_size(mesh.side_group(0, "reduce")), 2);
  });
}

TEST(DeviceMesh, FromGroupsTakesOneGroupPerDimension) {
  run_ranks(4, [](int64_t) {
    const auto grid = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    const auto mesh = DeviceMesh::from_groups({grid.group(0), grid.group(1)}, c10::kCPU,
                                              {0, 1, 2, 3}, {2, 2}, {"dp", "tp"});
    EXPECT_EQ(mesh, grid);
    EXPECT_EQ(mesh.coordinate(), grid.coordinate());
    EXPECT_EQ(mesh["tp"].group(), grid.group(1));

    EXPECT_VALUE_ERROR(
        DeviceMesh::from_groups({grid.group(0)}, c10::kCPU, {0, 1, 2, 3}, {2, 2}, {}),
        "1 groups for shape [2, 2]: expected one group per dimension");
    EXPECT_VALUE_ERROR(DeviceMesh::from_groups({grid.group(0), grid.group(1)}, c10::kCPU,
                                               {0, 1, 2, 3, 4, 5}, {2, 3}, {}),
                       "the group of dimension 1 has 2 ranks, expected 3 as in shape [2, 3]");
    EXPECT_VALUE_ERROR(
        DeviceMesh::from_groups({grid.group(0), grid.group(1)}, c10::kCPU, {0, 1, 2}, {2, 2}, {}),
        "shape [2, 2] has 4 places, expected 3 (the number of ranks given)");
    EXPECT_VALUE_ERROR(DeviceMesh::from_groups({grid.group(0), grid.group(1)}, c10::kCPU,
                                               {0, 1, 1, 2}, {2, 2}, {}),
                       "ranks [0, 1, 1, 2] are not unique");
    EXPECT_VALUE_ERROR(DeviceMesh::from_group({}, c10::kCPU), "group is null");
  });
}

TEST(DeviceMesh, EqualityAndHashFollowDeviceRanksShapeAndNames) {
  run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
    EXPECT_EQ(mesh, init_device_mesh(c10::kCPU, {2}, {"dp"}));
    EXPECT_EQ(mesh.hash(), init_device_mesh(c10::kCPU, {2}, {"dp"}).hash());
    EXPECT_NE(mesh, init_device_mesh(c10::kCPU, {2}, {"tp"}));
    EXPECT_NE(mesh, init_device_mesh(c10::kCPU, {2}));
    EXPECT_NE(mesh, init_device_mesh(c10::kCPU, {2, 1}, {"dp", "tp"}));
    EXPECT_NE(mesh, DeviceMesh::from_group(mesh.group(), c10::kCPU, {4, 7}, "dp"));
    EXPECT_EQ(std::hash<DeviceMesh>()(mesh), mesh.hash());
  });
}

TEST(DeviceMesh, ErrorsNameTheArgumentItsValueAndTheRank) {
  run_ranks(2, [](int64_t rank) {
    const std::string here = "(rank " + std::to_string(rank) + ")";
    EXPECT_VALUE_ERROR(
        init_device_mesh(c10::kCPU, {3}),
        "shape [3] has 3 places, expected 2 (the size of the default process group) " + here);
    EXPECT_VALUE_ERROR(init_device_mesh(c10::kCPU, {}), "shape is empty " + here);
    EXPECT_VALUE_ERROR(init_device_mesh(c10::kCPU, {-2}),
                       "shape [-2]: every dimension must be at least 1 " + here);
    EXPECT_VALUE_ERROR(init_device_mesh(c10::kCPU, {2}, {"a", "b"}),
                       "dim_names (a, b): expected 1 names or none " + here);
    EXPECT_VALUE_ERROR(init_device_mesh(c10::kCPU, {2, 1}, {"a", "a"}),
                       "'a' is empty or not unique " + here);
    EXPECT_VALUE_ERROR(init_device_mesh(c10::kCUDA, {2}),
                       "backend 'gloo' does not serve it " + here);

    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
    EXPECT_VALUE_ERROR(mesh["tp"], "dimension 'tp' is unknown; this mesh has (dp) " + here);
    EXPECT_VALUE_ERROR((mesh[Names{"dp", "dp"}]), "dimension 'dp' is named twice " + here);
    EXPECT_VALUE_ERROR(mesh[Names{}], "no dimension named " + here);
    EXPECT_VALUE_ERROR(init_device_mesh(c10::kCPU, {2})["dp"],
                       "this mesh has no dimension names " + here);
    EXPECT_THROW(mesh.size(1), c10::IndexError);
    EXPECT_THROW(mesh.group(-2), c10::IndexError);
  });
}

TEST(DeviceMesh, Prints) {
  init_process_group({.backend = "fake", .rank = 5, .world_size = 8});
  const auto mesh = init_device_mesh(c10::kCPU, {2, 4}, {"dp", "tp"});
  EXPECT_EQ(to_string(mesh), "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))");
  EXPECT_EQ(to_string(mesh["dp"]), "DeviceMesh((dp=2), 'cpu', stride=(4,))");
  std::ostringstream out;
  out << init_device_mesh(c10::kCPU, {4, 2});
  EXPECT_EQ(out.str(), "DeviceMesh((4, 2), 'cpu', stride=(2, 1))");
  destroy_process_group();
}

TEST(DeviceMesh, FakeGroupsStandForAnyWorld) {
  init_process_group({.backend = "fake", .rank = 1234, .world_size = 2048});
  const auto mesh = init_device_mesh(c10::kCPU, {16, 8, 16}, {"pp", "dp", "tp"});
  EXPECT_EQ(mesh.rank(), 1234);
  EXPECT_EQ(mesh.coordinate(), (Indices{9, 5, 2}));
  EXPECT_EQ(mesh.flatten({"pp", "tp"})["pp_tp"].size(), 256);
  EXPECT_EQ(internal::group_backend(mesh.group(2)), "fake");
  destroy_process_group();
}

}  // namespace
}  // namespace fsdp
