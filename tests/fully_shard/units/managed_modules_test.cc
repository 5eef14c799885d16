// What one fully_shard call finds.
#include "fully_shard/fully_shard.h"
#include "fully_shard/units/module_tree.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

// So it is moved, and cast, once.
TEST(ManagedModules, HaveABufferOnceWhereverItIsRegistered) {
  Pair model;
  const auto shared = model->first->register_buffer("scale", torch::ones({2}));
  model->second->register_buffer("scale", shared);
  model->second->register_buffer("again", shared);
  const auto own = model->second->register_buffer("own", torch::ones({2}));
  const auto buffers = internal::find_managed({model.ptr().get()}, {}).buffers;
  ASSERT_EQ(buffers.size(), 2);
  EXPECT_TRUE(buffers[0].is_same(shared));
  EXPECT_TRUE(buffers[1].is_same(own));
}

TEST(ManagedModules, LeaveBuffersToTheUnitBelowThatHasThem) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    model->first->register_buffer("scale", torch::ones({2}));
    const auto own = model->second->register_buffer("own", torch::ones({2}));
    fully_shard(model->first, mesh);
    const auto buffers = internal::find_managed({model.ptr().get()}, {}).buffers;
    ASSERT_EQ(buffers.size(), 1);
    EXPECT_TRUE(buffers[0].is_same(own));
  });
}

}  // namespace
}  // namespace fsdp::testing
