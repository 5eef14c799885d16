// What a save may remove: checkpoints, and what dead saves left. Nothing else.
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/io/commit.h"
#include "device_mesh/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/process_ranks.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/warnings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <set>

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;
using internal::checkpoint::Commit;
using internal::checkpoint::set_file_call_hook;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Names = std::set<std::string>;

void save_step(const std::string& path, int64_t step, SaveOptions options = {}) {
  options.step = step;
  save({.tensors = {{"w", torch::full({4}, static_cast<double>(step))}}}, path, options);
}

double value_in(const std::string& path) {
  auto w = torch::zeros({4});
  load({.tensors = {{"w", w}}}, path);
  return w[0].item<double>();
}

void write_text(const std::string& path) { std::ofstream(path) << "mine"; }

// Every path below `folder`.
Names all_below(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    names.insert(fs::relative(entry.path(), folder).string());
  }
  return names;
}

Names entries_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

// `change` throws a ValueError whose text matches, and leaves every path of `folder`.
template <class Matcher>
void expect_refused(const TemporaryFolder& folder, const std::function<void()>& change,
                    const Matcher& matcher) {
  const Names before = all_below(folder.path());
  expect_error<c10::ValueError>(change, matcher);
  EXPECT_EQ(all_below(folder.path()), before);
}

TEST(OwnFiles, OverwriteOfAFolderThatIsNoCheckpointIsRefusedAndLeavesIt) {
  TemporaryFolder folder;
  save_step(folder / "runs/step-1", 1);
  write_text(folder / "runs/notes.txt");
  const auto matcher = AllOf(HasSubstr("replaces checkpoints and nothing else"),
                             HasSubstr("'notes.txt' and 3 more"), HasSubstr("runs"));
  expect_refused(
      folder, [&] { save_step(folder / "runs", 2, {.overwrite = true}); }, matcher);
  expect_refused(
      folder, [&] { save_step(folder / "runs/.", 2, {.overwrite = true}); }, matcher);
  expect_refused(
      folder,
      [&] { convert_checkpoint(folder / "runs/step-1", folder / "runs", {.overwrite = true}); },
      AllOf(matcher, HasSubstr("convert to")));
  EXPECT_EQ(value_in(folder / "runs/step-1"), 1);
}

TEST(OwnFiles, OverwriteOfAFileOrALinkIsRefusedAndLeavesIt) {
  TemporaryFolder folder;
  write_text(folder / "weights");
  save_step(folder / "step-1", 1);
  fs::create_directory_symlink(folder / "step-1", folder / "latest");
  fs::create_directory_symlink(folder / "gone", folder / "dangling");
  const auto save_over = [&](const std::string& name) {
    return [&, name] { save_step(folder / name, 2, {.overwrite = true}); };
  };
  expect_refused(folder, save_over("weights"), HasSubstr("this is a file"));
  expect_refused(folder, save_over("latest"), HasSubstr("this is a symbolic link"));
  expect_refused(folder, save_over("dangling"), HasSubstr("this is a symbolic link"));
  EXPECT_EQ(value_in(folder / "latest"), 1);
}

TEST(OwnFiles, EveryRankIsToldThatAFolderIsNoCheckpoint) {
  TemporaryFolder folder;
  fs::create_directories(folder / "runs");
  write_text(folder / "runs/notes.txt");
  run_ranks(2, [&](int64_t) {
    expect_error<c10::ValueError>([&] { save_step(folder / "runs", 2, {.overwrite = true}); },
                                  HasSubstr("rank 0: SaveOptions::overwrite replaces checkpoints"));
  });
  EXPECT_EQ(all_below(folder.path()), (Names{"runs", "runs/notes.txt"}));
}

TEST(OwnFiles, OverwriteReplacesACheckpointWholeOrDamagedAndAnEmptyFolder) {
  TemporaryFolder folder;
  save_step(folder / "last", 1);
  fs::remove(folder / "last/tensors/model.safetensors");
  save_step(folder / "last", 2, {.overwrite = true});
  EXPECT_EQ(value_in(folder / "last"), 2);
  fs::create_directories(folder / "empty");
  save_step(folder / "empty", 3, {.overwrite = true});
  EXPECT_EQ(value_in(folder / "empty"), 3);
  EXPECT_EQ(entries_in(folder.path()), (Names{"empty", "last"}));
}

TEST(OwnFiles, WhatSomebodyPutIntoACheckpointIsNeverRemoved) {
  TemporaryFolder folder;
  save_step(folder / "step-1", 1);
  write_text(folder / "step-1/tensors/config.json");
  save_step(folder / "step-1/nested", 5);
  expect_refused(
      folder, [&] { save_step(folder / "step-1", 2, {.overwrite = true}); },
      AllOf(HasSubstr("more, which is none of a checkpoint's files"), HasSubstr("nested")));
  {
    const Warnings warnings;
    save_step(folder / "step-2", 2, {.keep_last = 1});
    EXPECT_THAT(warnings.texts(),
                ElementsAre(HasSubstr("keep_last removes checkpoints and nothing else")));
  }
  EXPECT_EQ(value_in(folder / "step-1"), 1);
  EXPECT_EQ(value_in(folder / "step-1/nested"), 5);
  EXPECT_TRUE(fs::exists(folder / "step-1/tensors/config.json"));
}

TEST(OwnFiles, HiddenFoldersOfOthersAreNeitherRemovedNorTakenForCheckpoints) {
  TemporaryFolder folder;
  save_step(folder / "elsewhere", 7);
  const Names mine = {".run.old-backup", ".run.saving-mine", ".run.removing",
                      ".run.saving-0123456789abcdef"};
  for (const auto& name : mine) {
    fs::create_directories(folder / name);
    write_text(folder / (name + "/notes.txt"));
  }
  fs::copy(folder / "elsewhere", folder / ".run.old-backup", fs::copy_options::recursive);
  save_step(folder / "run", 1);
  save_step(folder / "run", 2, {.overwrite = true, .keep_last = 2});
  Names expected = mine;
  expected.insert({"run", "elsewhere"});
  EXPECT_EQ(entries_in(folder.path()), expected);
  for (const auto& name : mine) EXPECT_TRUE(fs::exists(folder / (name + "/notes.txt"))) << name;
  EXPECT_EQ(value_in(folder / "run"), 2);
}

TEST(OwnFiles, LinksNeitherCountForKeepLastNorAreRemoved) {
  TemporaryFolder folder;
  for (int64_t step = 1; step <= 4; ++step) {
    const std::string name = "step-" + std::to_string(step);
    save_step(folder / name, step, {.keep_last = 2});
    fs::remove(folder / "latest");
    fs::create_directory_symlink(folder / name, folder / "latest");
    if (step == 1) fs::create_directory_symlink(folder / name, folder / "first");
  }
  EXPECT_EQ(entries_in(folder.path()), (Names{"first", "latest", "step-3", "step-4"}));
  EXPECT_EQ(*latest_checkpoint(folder.path()), folder / "step-4");
  EXPECT_EQ(value_in(folder / "latest"), 4);
}

TEST(OwnFiles, AnInterruptedRemovalOfAnotherStepIsFinishedByTheNextSave) {
  for (const char* call : {"unlink", "rmdir"}) {
    for (int at = 0; at < 4; ++at) {
      TemporaryFolder folder(memory_folder());
      save_step(folder / "step-1", 1);
      int count = 0;
      set_file_call_hook([&](std::string_view name, const std::string& path) {
        const bool of_old = path.find("step-1") != std::string::npos;
        return name == call && of_old && count++ >= at ? EIO : 0;
      });
      save_step(folder / "step-2", 2, {.keep_last = 1});
      set_file_call_hook(nullptr);
      save_step(folder / "step-3", 3, {.keep_last = 1});
      EXPECT_EQ(entries_in(folder.path()), Names{"step-3"}) << call << " " << at;
    }
  }
}

// Of a process: kills itself at its file-system call number KILLED_AT.
const ChildCase kKilledWriter("checkpoint_killed_writer", [] {
  int count = 0;
  set_file_call_hook([&](std::string_view, const std::string&) {
    if (count++ == std::atoi(std::getenv("KILLED_AT"))) kill(getpid(), SIGKILL);
    return 0;
  });
  save_step(std::getenv("KILLED_PATH"), 1);
  return 0;
});

TEST(OwnFiles, WhatADeadSaveOfAnotherStepLeftIsRemovedByTheNextSave) {
  for (const char* at : {"1", "3", "6"}) {
    TemporaryFolder folder(memory_folder());
    run_processes("checkpoint_killed_writer", 1, std::chrono::seconds(30),
                  {{"KILLED_AT", at}, {"KILLED_PATH", folder / "step-1"}});
    EXPECT_EQ(entries_in(folder.path()).size(), 1u);
    save_step(folder / "step-2", 2);
    EXPECT_EQ(entries_in(folder.path()), Names{"step-2"}) << at;
  }
}

TEST(OwnFiles, WhatALivingSaveWritesStays) {
  TemporaryFolder folder;
  {
    const auto living = Commit::begin(folder / "step-1", "0123456789abcdef", {"tensors"}, false);
    ASSERT_TRUE(living.ok());
    save_step(folder / "step-2", 2);
    EXPECT_EQ(entries_in(folder.path()), (Names{".step-1.saving-0123456789abcdef", "step-2"}));
  }
  EXPECT_EQ(entries_in(folder.path()), Names{"step-2"});
}

// The file system cannot exchange two folders, and the save dies between the renames.
TEST(OwnFiles, ThePreviousCheckpointOfAnotherStepStaysWhereAnOverwriteMovedIt) {
  TemporaryFolder folder;
  save_step(folder / "step-1", 1);
  int renames = 0;
  set_file_call_hook([&](std::string_view name, const std::string&) {
    if (name == "exchange") return EINVAL;
    return name == "rename" && ++renames >= 2 ? EIO : 0;
  });
  EXPECT_THROW(save_step(folder / "step-1", 9, {.overwrite = true}), c10::Error);
  set_file_call_hook(nullptr);
  save_step(folder / "step-2", 2);
  EXPECT_EQ(value_in(folder / "step-1"), 1);
  save_step(folder / "step-3", 3, {.keep_last = 1});
  EXPECT_EQ(entries_in(folder.path()), Names{"step-3"});
}

}  // namespace
}  // namespace fsdp::testing
