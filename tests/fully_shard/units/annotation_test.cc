// Which modules a unit manages.
#include "fully_shard/annotation.h"

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/units/plain_modules.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::IsEmpty;

// {path, name of the unit}
using Marks = std::vector<std::pair<std::string, std::string>>;

Marks marks_of(const ModulePtr& module) {
  Marks marks;
  for (const auto& mark : annotations(*module)) {
    marks.emplace_back(mark.path, mark.unit.name());
  }
  return marks;
}

// Of this process, in bytes.
int64_t resident_memory() {
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

ModulePtr buffered() {
  auto made = bare();
  made->register_buffer("count", torch::zeros({1}));
  return made;
}

class Annotations : public Worlds {};

TEST_P(Annotations, AreOfEveryModuleOfAUnitButIgnorableOnes) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto layer = weighted({{"activation", bare()}, {"norm", buffered()}});
    const auto ignored = weighted({{"below", weighted()}});
    const auto model = weighted({{"layer", layer}, {"ignored", ignored}, {"empty", bare()}});
    EXPECT_THAT(marks_of(model), IsEmpty());
    const auto unit = fully_shard(model, mesh, {.ignored_params = ignored->parameters()});
    EXPECT_EQ(marks_of(model), (Marks{{"", ""}, {"layer", ""}, {"layer.norm", ""}}));
    EXPECT_EQ(annotations(*model)[1].module, layer.get());
    EXPECT_EQ(annotations(*model)[1].unit, unit);
  });
}

TEST_P(Annotations, OfAnInnerUnitStayItsOwn) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto inner = weighted({{"deep", weighted()}});
    const auto root = weighted({{"plain", bare({{"inner", inner}})}});
    const auto inner_unit = fully_shard(inner, mesh);
    EXPECT_EQ(marks_of(root), (Marks{{"plain.inner", ""}, {"plain.inner.deep", ""}}));
    const auto root_unit = fully_shard(root, mesh);
    EXPECT_EQ(marks_of(root), (Marks{{"", ""},
                                     {"plain", ""},
                                     {"plain.inner", "plain.inner"},
                                     {"plain.inner.deep", "plain.inner"}}));
    const auto marks = annotations(*root);
    EXPECT_EQ(marks[1].unit, root_unit);
    EXPECT_EQ(marks[3].unit, inner_unit);
    EXPECT_EQ(marks_of(inner), (Marks{{"", "plain.inner"}, {"deep", "plain.inner"}}));
  });
}

INSTANTIATE_WORLDS(Annotations, 1, 2);

TEST(AnnotationsAlone, AreMissingForIgnorableModulesOnly) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto is_marked = [&](const ModulePtr& module, const std::vector<torch::Tensor>& ignored) {
      const auto model = weighted({{"module", module}});
      fully_shard(model, mesh, {.ignored_params = ignored});
      const auto marks = marks_of(model);
      return std::any_of(marks.begin(), marks.end(),
                         [](const auto& mark) { return mark.first == "module"; });
    };
    EXPECT_FALSE(is_marked(bare(), {})) << "nothing to manage";
    EXPECT_TRUE(is_marked(buffered(), {})) << "a buffer";
    EXPECT_TRUE(is_marked(weighted(), {})) << "a parameter";
    const auto ignored = weighted();
    EXPECT_FALSE(is_marked(ignored, ignored->parameters())) << "an ignored parameter";
    const auto below = weighted();
    EXPECT_TRUE(is_marked(bare({{"a", weighted()}, {"b", below}}), below->parameters()))
        << "one child that is not ignorable";
    EXPECT_FALSE(is_marked(bare({{"a", bare()}, {"b", bare({{"c", bare()}})}}), {}))
        << "ignorable children";
  });
}

TEST(AnnotationsAlone, OfANormalisationStayForItsStatistics) {
  on_one_rank([](const DeviceMesh& mesh) {
    torch::nn::BatchNorm1d with(4),
        without(torch::nn::BatchNorm1dOptions(4).track_running_stats(false));
    const auto model = weighted({{"with", with.ptr()}, {"without", without.ptr()}});
    auto ignored = with->parameters();
    for (const auto& parameter : without->parameters()) ignored.push_back(parameter);
    fully_shard(model, mesh, {.ignored_params = ignored});
    EXPECT_EQ(marks_of(model), (Marks{{"", ""}, {"with", ""}}));
  });
}

// A walk along every path would not come to its end.
TEST(AnnotationsAlone, OfADiamondTakeTimeByItsModules) {
  on_one_rank([](const DeviceMesh& mesh) {
    constexpr size_t kLevels = 60;
    const auto diamond = [](ModulePtr module) {
      for (size_t i = 0; i < kLevels; ++i) module = bare({{"left", module}, {"right", module}});
      return module;
    };
    const auto model = diamond(weighted());
    fully_shard(model, mesh);
    EXPECT_EQ(marks_of(model).size(), kLevels + 1);
    const auto ignored = weighted();
    const auto other = diamond(ignored);
    fully_shard(other, mesh, {.ignored_params = {ignored->parameters()[0]}});
    EXPECT_THAT(marks_of(other), IsEmpty());
  });
}

// All paths together are 8,000 times 8,000 letters.
TEST(AnnotationsAlone, OfADeepChainTakeTimeAndMemoryByItsModules) {
  on_one_rank([](const DeviceMesh& mesh) {
    constexpr size_t kDepth = 8000;
    ModulePtr model = weighted();
    for (size_t i = 1; i < kDepth; ++i) model = bare({{"x", model}});
    fully_shard(model, mesh);
    const auto before = resident_memory();
    const auto marks = annotations(*model);
    EXPECT_LT(resident_memory() - before, int64_t{20} << 20);
    ASSERT_EQ(marks.size(), kDepth);
    EXPECT_EQ(marks[0].path, "");
    EXPECT_EQ(marks[3].path, "x.x.x");
    EXPECT_EQ(marks.back().path.str().size(), 2 * (kDepth - 1) - 1);
  });
}

TEST(AnnotationsAlone, HavePathsThatOutliveTheModules) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto model = bare({{"a", bare({{"b", weighted()}})}});
    fully_shard(model, mesh);
    const ModulePath path = annotations(*model).back().path;
    model = nullptr;
    EXPECT_EQ(path, "a.b");
    EXPECT_EQ(c10::str(path), "a.b");
  });
}

TEST(AnnotationsAlone, OfASharedModuleAreTheUnitsThatHasItWhereverItIsMet) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto shared = weighted(), unit = bare({{"x", shared}});
    const auto root = bare({{"plain", bare({{"x", shared}})}, {"unit", unit}});
    fully_shard(unit, mesh);
    EXPECT_EQ(marks_of(root), (Marks{{"plain.x", ""}, {"unit", ""}}));
  });
}

TEST(AnnotationsAlone, OfAUnitOfSeveralModulesAreOfAllOfThem) {
  on_one_rank([](const DeviceMesh& mesh) {
    const auto a = weighted(), b = weighted({{"x", weighted()}});
    const auto root = weighted({{"a", a}, {"b", b}});
    fully_shard(std::vector<torch::nn::Module*>{a.get(), b.get()}, mesh);
    fully_shard(root, mesh);
    EXPECT_EQ(marks_of(root), (Marks{{"", ""}, {"a", "a"}, {"b", "a"}, {"b.x", "a"}}));
  });
}

}  // namespace
}  // namespace fsdp::testing
