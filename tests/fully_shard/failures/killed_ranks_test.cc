// Ranks that are killed, or stopped for a while, at any moment of a training: the others
// learn of it soon, or not at all, and nothing is left behind.
#include "device_mesh/process_group.h"
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/process_ranks.h"
#include "tests/support/slowdown.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;

// Signals to another rank's process. Collective when it is made.
class Signals {
 public:
  Signals(const DeviceMesh& mesh, int64_t target) {
    const auto pids = all_reduce(
        torch::zeros({mesh.size()}, torch::kLong).index_put_({mesh.rank()}, int64_t{getpid()}),
        mesh, Reduce::kSum);
    pid_ = static_cast<pid_t>(pids[target].item<int64_t>());
  }
  void send(int signal) const { kill(pid_, signal); }

 private:
  pid_t pid_;
};

double train(const DeviceMesh& mesh, int64_t steps) {
  auto model = build_seeded([] { return decoder_model(4, 1); });
  shard_decoder(*model.module, mesh);
  torch::optim::SGD optimizer(model.module->parameters(), 0.01);
  double loss = 0;
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto value = model.loss(make_data(static_cast<uint64_t>(mesh.rank() + 10 * (step % 7))));
    value.backward();
    optimizer.step();
    loss = value.item<double>();
  }
  return loss;
}

// Rank FSDP_KILL_RANK is killed by the next one after FSDP_KILL_AFTER_US, which tells how
// long after that it learned of it.
const ChildCase kKilled("one_rank_is_killed", [] {
  const auto mesh = init_device_mesh(torch::kCPU, {launch_environment().world_size});
  const auto target = static_cast<int64_t>(number_from_environment("FSDP_KILL_RANK", 0));
  const Signals to_target(mesh, target);
  const auto delay = number_from_environment("FSDP_KILL_AFTER_US", 0);
  Clock::time_point killed;
  std::thread killer;
  if (mesh.rank() == (target + 1) % mesh.size()) {
    killer = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
      killed = Clock::now();
      to_target.send(SIGKILL);
    });
  }
  std::string error;
  try {
    train(mesh, 1 << 20);
  } catch (const c10::Error& failure) {
    error = failure.what_without_backtrace();
  }
  const auto learned = Clock::now();
  if (killer.joinable()) {
    killer.join();
    std::printf("after %lld ms\n",
                static_cast<long long>(std::chrono::ceil<milliseconds>(learned - killed).count()));
  }
  std::printf("error: %s\n", error.c_str());
  destroy_process_group();
  return 7;
});

// Processes of that case that still run. Their memory has no name, and goes with them.
int64_t processes_left(const std::string& child) {
  int64_t count = 0;
  std::error_code none;
  for (const auto& process : fs::directory_iterator("/proc", none)) {
    std::ifstream file(process.path() / "cmdline");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    if (text.find("--child=" + child) != std::string::npos) ++count;
  }
  return count;
}

TEST(KilledRanks, AreNamedByTheOthersWithinASecondAndLeaveNothing) {
  const auto kills = number_from_environment("FSDP_KILLS", 4);
  std::mt19937 random(static_cast<unsigned>(number_from_environment("FSDP_FIRST_SEED", 1)));
  for (uint64_t i = 0; i < kills; ++i) {
    const int64_t world = 2 + static_cast<int64_t>(i % 2);
    const auto target = static_cast<int64_t>(random() % static_cast<unsigned>(world));
    const auto delay = random() % 400'000;
    const auto name = "rank " + std::to_string(target);
    const auto ends = run_processes("one_rank_is_killed", world, seconds(60),
                                    {{"FSDP_KILL_RANK", std::to_string(target)},
                                     {"FSDP_KILL_AFTER_US", std::to_string(delay)}});
    for (int64_t rank = 0; rank < world; ++rank) {
      const auto& end = ends[static_cast<size_t>(rank)];
      EXPECT_EQ(end.exit_code, rank == target ? 128 + SIGKILL : 7) << delay << ": " << end.output;
      if (rank == target) continue;
      EXPECT_THAT(end.output, HasSubstr(name)) << delay << ", rank " << rank;
    }
    const auto& output = ends[static_cast<size_t>((target + 1) % world)].output;
    const auto took = std::stoll(output.substr(output.find("after ") + 6));
    EXPECT_LE(took, kSlowdown * 1000) << name << " after " << delay << ": " << output;
  }
  EXPECT_EQ(processes_left("one_rank_is_killed"), 0);
}

// Rank 0 stops the last one for FSDP_STOP_MS in the middle of the training.
const ChildCase kStopped("one_rank_is_stopped", [] {
  const auto mesh = init_device_mesh(torch::kCPU, {launch_environment().world_size});
  const Signals to_last(mesh, mesh.size() - 1);
  const auto stop = number_from_environment("FSDP_STOP_MS", 0);
  std::thread stopper;
  if (mesh.rank() == 0 && stop > 0) {
    stopper = std::thread([&] {
      std::this_thread::sleep_for(milliseconds(20));
      to_last.send(SIGSTOP);
      std::this_thread::sleep_for(milliseconds(stop));
      to_last.send(SIGCONT);
    });
  }
  std::printf("loss %a\n", train(mesh, 40));
  if (stopper.joinable()) stopper.join();
  destroy_process_group();
  return 0;
});

TEST(KilledRanks, ARankThatWasStoppedForAWhileLosesNothing) {
  if (!is_night()) GTEST_SKIP() << "at night: a quarter of a minute";
  const auto losses = [](const std::string& stop) {
    std::vector<std::string> losses;
    for (const auto& end :
         run_processes("one_rank_is_stopped", 2, seconds(90), {{"FSDP_STOP_MS", stop}})) {
      EXPECT_EQ(end.exit_code, 0) << end.output;
      // Behind what c10d says of a rank that was stopped while others connected to it.
      const auto loss = end.output.find("loss ");
      losses.push_back(loss == std::string::npos ? end.output : end.output.substr(loss));
    }
    return losses;
  };
  const auto stop = number_from_environment("FSDP_STOP_MS", 1500);
  EXPECT_EQ(losses(std::to_string(stop)), losses("0"));
}

}  // namespace
}  // namespace fsdp::testing
