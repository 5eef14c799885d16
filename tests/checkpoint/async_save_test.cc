// Saves in the background.
#include "checkpoint/async_save.h"

#include "checkpoint/files/file_calls.h"
#include "device_mesh/process_group.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace fsdp::testing {
namespace {

using internal::checkpoint::set_file_call_hook;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// While closed, no file is written.
class Gate {
 public:
  Gate() {
    set_file_call_hook([this](std::string_view call, const std::string&) {
      if (call != "write") return 0;
      std::unique_lock lock(mutex_);
      opened_.wait(lock, [&] { return open_; });
      return 0;
    });
  }
  ~Gate() {
    open();
    set_file_call_hook(nullptr);
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

void expect_small(const std::string& path, int64_t seed) {
  SmallModel model, expected;
  fill(*model, seed + 1);
  fill(*expected, seed);
  load({.model = model}, path);
  const auto want = full_values(*expected);
  for (const auto& item : full_values(*model)) {
    EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
  }
}

TEST(AsyncSave, TrainingGoesOnAndTheOldValuesAreSaved) {
  for (const Layout layout : {Layout::kSharded, Layout::kFull}) {
    TemporaryFolder folder;
    Gate gate;
    run_ranks(3, [&](int64_t rank) {
      SmallModel model;
      shard_small_model(model, init_device_mesh(torch::kCPU, {3}));
      fill(*model, 1);
      SaveHandle saving = async_save({.model = model}, folder / "saved", {.layout = layout});
      EXPECT_FALSE(saving.is_done());
      EXPECT_FALSE(latest_checkpoint(folder.path()));
      fill(*model, 2);
      model->forward(torch::ones({4, 5})).sum().backward();  // collectives beside the save's
      if (rank == 0) gate.open();
      saving.wait();
      EXPECT_TRUE(saving.is_done());
      saving.wait();  // again is fine
    });
    verify_checkpoint(folder / "saved");
    expect_small(folder / "saved", 1);
  }
}

TEST(AsyncSave, WhatExceedsTheStagingBytesIsWrittenBeforeTheCallReturns) {
  TemporaryFolder folder;
  for (const int64_t staging : {int64_t{0}, int64_t{64 * 3}, INT64_MAX}) {
    std::atomic<int> writes = 0, early = 0;
    std::atomic<bool> returned = false;
    set_file_call_hook([&](std::string_view call, const std::string& path) {
      if (call != "write" || !path.ends_with("model.safetensors")) return 0;
      writes += 1;
      early += returned ? 0 : 1;
      return 0;
    });
    const std::string path = folder / std::to_string(staging);
    const auto value = [](int i) { return torch::full({16}, i); };  // 128 bytes
    {
      std::map<std::string, at::Tensor> tensors;
      for (int i = 0; i < 5; ++i) tensors[std::to_string(i)] = value(i);
      SaveHandle saving = async_save({.tensors = tensors}, path, {}, {.staging_bytes = staging});
      const int at_return = early;
      returned = true;
      for (auto& [name, tensor] : tensors) tensor.fill_(-1);
      saving.wait();
      EXPECT_EQ(writes, 6);  // the header and five tensors
      const int at_least = staging == 0 ? 6 : staging == 64 * 3 ? 5 : 0;  // one fits, or all
      EXPECT_GE(at_return, at_least) << staging;
      std::map<std::string, at::Tensor> loaded;
      for (int i = 0; i < 5; ++i) loaded[std::to_string(i)] = value(-2);
      load({.tensors = loaded}, path);
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(torch::equal(loaded[std::to_string(i)], value(i)));
    }
    set_file_call_hook(nullptr);
  }
}

TEST(AsyncSave, TheNextSaveWaitsForTheLast) {
  TemporaryFolder folder;
  Gate gate;
  run_ranks(2, [&](int64_t rank) {
    const std::map<std::string, at::Tensor> tensors = {{"w", torch::ones({4})}};
    const SaveHandle first = async_save({.tensors = tensors}, folder / "first");
    std::thread opener([&] {
      if (rank != 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      EXPECT_FALSE(fs::exists(folder / "first"));
      gate.open();
    });
    SaveHandle second = async_save({.tensors = tensors}, folder / "second");
    EXPECT_TRUE(first.is_done());
    EXPECT_TRUE(fs::exists(folder / "first"));
    opener.join();
    save({.tensors = tensors}, folder / "third");
    EXPECT_TRUE(fs::exists(folder / "second"));
    second.wait();
  });
}

TEST(AsyncSave, EndingTheProcessGroupWaitsForTheSave) {
  TemporaryFolder folder;
  Gate gate;
  run_ranks(2, [&](int64_t rank) {
    const std::map<std::string, at::Tensor> tensors = {{"w", torch::ones({4})}};
    const SaveHandle saving = async_save({.tensors = tensors}, folder / "saved");
    std::thread opener([&] {
      if (rank != 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      gate.open();
    });
    EXPECT_FALSE(fs::exists(folder / "saved"));
    destroy_process_group();
    EXPECT_TRUE(saving.is_done());
    opener.join();
  });
  verify_checkpoint(folder / "saved");
}

TEST(AsyncSave, AnErrorThatNobodyWasToldIsThrownByEndingTheProcessGroup) {
  TemporaryFolder folder;
  set_file_call_hook(
      [](std::string_view call, const std::string&) { return call == "write" ? ENOSPC : 0; });
  for (const bool told : {false, true}) {
    run_ranks(2, [&](int64_t) {
      const std::map<std::string, at::Tensor> tensors = {{"w", torch::ones({4})}};
      {
        SaveHandle saving = async_save({.tensors = tensors}, folder / "saved");
        if (told) {
          EXPECT_THAT(message_of([&] { saving.wait(); }), HasSubstr("No space left"));
        }
      }
      if (told) {
        destroy_process_group();
      } else {
        EXPECT_THAT(message_of([] { destroy_process_group(); }),
                    HasSubstr("No space left on device"));
      }
      EXPECT_FALSE(is_process_group_initialized());
    });
  }
  set_file_call_hook(nullptr);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(AsyncSave, ErrorsAreThrownByWaitOrByTheNextSave) {
  TemporaryFolder folder;
  std::atomic<bool> full = true;
  set_file_call_hook([&](std::string_view call, const std::string& path) {
    return full && call == "write" && path.find("shard-00002") != std::string::npos ? ENOSPC : 0;
  });
  on_ranks_of(2, [&](int64_t rank, const DeviceMesh& mesh) {
    const std::map<std::string, at::Tensor> tensors = {
        {"w", distribute_tensor(torch::ones({4}), mesh, {Shard{0}})}};
    SaveHandle waited = async_save({.tensors = tensors}, folder / "waited");
    EXPECT_THAT(message_of([&] { waited.wait(); }), HasSubstr("No space left on device"));
    { const SaveHandle dropped = async_save({.tensors = tensors}, folder / "dropped"); }
    EXPECT_THAT(message_of([&] { save({.tensors = tensors}, folder / "next"); }),
                HasSubstr("No space left on device"));
    { const SaveHandle dropped = async_save({.tensors = tensors}, folder / "dropped"); }
    EXPECT_THAT(message_of([&] { async_save({.tensors = tensors}, folder / "next"); }),
                HasSubstr("rank 1: write"));
    if (rank == 0) full = false;
    while (full) std::this_thread::yield();
    save({.tensors = tensors}, folder / "good");
  });
  set_file_call_hook(nullptr);
  EXPECT_EQ(*latest_checkpoint(folder.path()), folder / "good");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);  // no litter
}

}  // namespace
}  // namespace fsdp::testing
