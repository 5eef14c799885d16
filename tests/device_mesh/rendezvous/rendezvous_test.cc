#include "device_mesh/rendezvous/rendezvous.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace fsdp::internal {
namespace {

using Variables = std::map<std::string, std::string>;

Environment environment_of(Variables variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

LaunchEnvironment parse(Variables variables) {
  return parse_launch_environment(environment_of(std::move(variables)));
}

std::string error_of(Variables variables) {
  try {
    parse(std::move(variables));
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_place(const LaunchEnvironment& here, int64_t rank, int64_t world_size,
                  int64_t local_rank) {
  EXPECT_EQ(here.rank, rank);
  EXPECT_EQ(here.world_size, world_size);
  EXPECT_EQ(here.local_rank, local_rank);
}

TEST(Rendezvous, NoLauncherIsAWorldOfOne) {
  const auto here = parse({});
  expect_place(here, 0, 1, 0);
  EXPECT_EQ(here.master_addr, "");
  EXPECT_EQ(here.master_port, 29500);
}

TEST(Rendezvous, Torchrun) {
  const auto here = parse({{"RANK", "3"},
                           {"WORLD_SIZE", "4"},
                           {"LOCAL_RANK", "1"},
                           {"MASTER_ADDR", "node0"},
                           {"MASTER_PORT", "1234"},
                           {"SLURM_PROCID", "0"},
                           {"SLURM_NTASKS", "2"}});
  expect_place(here, 3, 4, 1);
  EXPECT_EQ(here.master_addr, "node0");
  EXPECT_EQ(here.master_port, 1234);
}

TEST(Rendezvous, Srun) {
  expect_place(parse({{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}, {"SLURM_LOCALID", "2"}}), 5, 6,
               2);
}

TEST(Rendezvous, SlurmBatchScriptWithoutSrunIsAWorldOfOne) {
  expect_place(parse({{"SLURM_NTASKS", "6"}}), 0, 1, 0);
}

TEST(Rendezvous, OpenMpi) {
  expect_place(parse({{"OMPI_COMM_WORLD_RANK", "1"},
                      {"OMPI_COMM_WORLD_SIZE", "2"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}),
               1, 2, 1);
}

TEST(Rendezvous, Mpich) { expect_place(parse({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}}), 1, 3, 0); }

TEST(Rendezvous, HalfAPairNamesTheMissingVariable) {
  EXPECT_EQ(error_of({{"RANK", "1"}}),
            "environment variable RANK='1' is set but WORLD_SIZE is not; set both, or neither for "
            "a world of one");
  EXPECT_EQ(error_of({{"WORLD_SIZE", "2"}}),
            "environment variable WORLD_SIZE='2' is set but RANK is not; set both, or neither for "
            "a world of one");
}

TEST(Rendezvous, BadValuesNameTheVariableTheValueAndTheRange) {
  EXPECT_EQ(error_of({{"RANK", "two"}, {"WORLD_SIZE", "4"}}),
            "environment variable RANK='two': expected an integer from 0 to 3");
  EXPECT_EQ(error_of({{"RANK", "4"}, {"WORLD_SIZE", "4"}}),
            "environment variable RANK='4': expected an integer from 0 to 3");
  EXPECT_EQ(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}),
            "environment variable WORLD_SIZE='0': expected an integer from 1 to 16777216");
  EXPECT_EQ(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "-1"}}),
            "environment variable LOCAL_RANK='-1': expected an integer from 0 to 1");
  EXPECT_EQ(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2x"}}),
            "environment variable WORLD_SIZE='2x': expected an integer from 1 to 16777216");
  EXPECT_EQ(error_of({{"MASTER_PORT", "70000"}}),
            "environment variable MASTER_PORT='70000': expected an integer from 1 to 65535");
}

TEST(Rendezvous, TorchrunsAgentServesTheStore) {
  const auto alone = parse_store_host(environment_of({}));
  EXPECT_FALSE(alone.served_by_launcher);
  const auto agent = parse_store_host(environment_of(
      {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_TRUE(agent.served_by_launcher);
  EXPECT_EQ(agent.key_prefix, "attempt_2");
}

}  // namespace
}  // namespace fsdp::internal
