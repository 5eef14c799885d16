// What compiles with the public headers alone.
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"

#include <gtest/gtest.h>

namespace {

TEST(PublicHeaders, TheDefaultGroupCanBeHandedOn) {
  fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = 1});
  fsdp::default_process_group();
  const auto& group = fsdp::default_process_group();
  EXPECT_EQ(&group, &fsdp::default_process_group());
  fsdp::destroy_process_group();
}

}  // namespace
