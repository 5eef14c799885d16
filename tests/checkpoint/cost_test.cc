// What saving and loading cost besides the bytes: collectives, bytes read.
#include "checkpoint/async_save.h"
#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/io/tensor_reader.h"
#include "device_mesh/process_group.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>

namespace fsdp::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

uint64_t collectives_of(const std::function<void()>& body) {
  const uint64_t before = default_process_group()->getSequenceNumberForGroup();
  body();
  return default_process_group()->getSequenceNumberForGroup() - before;
}

TEST(Cost, SavingIsThreeExchangesAndLoadingTwoWhateverThereIsToSave) {
  const WithEnvironment c10d_counts("FSDP_PEER_MEMORY", "off");
  TemporaryFolder folder;
  on_ranks_of(2, [&](const DeviceMesh& mesh) {
    for (const int count : {1, 30}) {
      std::map<std::string, at::Tensor> tensors;
      for (int i = 0; i < count; ++i) {
        tensors["t" + std::to_string(i)] = distribute_tensor(torch::ones({5}), mesh, {Shard{0}});
      }
      const auto path = folder / std::to_string(count);
      // An announcement, with which the text travels, to and from the other rank.
      constexpr uint64_t kExchange = 2;
      EXPECT_EQ(collectives_of([&] { save({.tensors = tensors}, path); }), 3 * kExchange);
      EXPECT_EQ(collectives_of([&] { load({.tensors = tensors}, path); }), 2 * kExchange);
      // Whole tensors: each is announced to one other rank, with this rank's part.
      const uint64_t gathers = kExchange * static_cast<uint64_t>(count);
      const auto save_full = [&] {
        save({.tensors = tensors}, path + "-full", {.layout = Layout::kFull});
      };
      EXPECT_EQ(collectives_of(save_full), 3 * kExchange + gathers);
      // In the background only the first exchange is the training's; once, the
      // announcement of the group that the others go through, too.
      SaveHandle saving;
      EXPECT_EQ(collectives_of([&] { saving = async_save({.tensors = tensors}, path + "-async"); }),
                (count == 1 ? 2 : 1) * kExchange);
      saving.wait();
    }
  });
}

TEST(Cost, ARankReadsAboutWhatItNeeds) {
  TemporaryFolder folder;
  const auto whole = torch::rand({1024, 1024});  // 4 MiB
  on_ranks_of(4, [&](const DeviceMesh& mesh) {
    save({.tensors = {{"w", distribute_tensor(whole, mesh, {Shard{0}})}}}, folder / "saved");
  });
  using namespace internal::checkpoint;
  const auto manifest = read_manifest(folder / "saved").value();
  const auto catalog = catalog_of_item(folder / "saved", manifest, "tensors").value();
  on_ranks_of(3, [&](int64_t rank, const DeviceMesh& mesh) {
    const auto target = distribute_tensor(torch::zeros({1024, 1024}), mesh, {Shard{0}});
    TensorReader reader(catalog, {.verify = true});
    ASSERT_TRUE(reader.plan("w", "w", target).ok());
    ASSERT_TRUE(reader.read().ok());
    const auto needed = static_cast<int64_t>(DTensor(target).to_local().nbytes());
    EXPECT_LE(reader.bytes_read(), 2 * needed + 2 * kMiB) << rank;
    EXPECT_TRUE(torch::equal(DTensor(target).to_local(),
                             DTensor(distribute_tensor(whole, mesh, {Shard{0}})).to_local()));
  });
}

}  // namespace
}  // namespace fsdp::testing
