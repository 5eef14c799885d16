#include "programs/trainer/report/output_file.h"

#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

namespace programs {
namespace {

using fsdp::testing::expect_error;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string text_in(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_text(const std::string& path, const std::string& text) {
  write_output_file({"--report", path}, [&](std::ostream& file) { file << text; });
}

TEST(OutputFile, IsTriedAndLeftAlone) {
  const fsdp::testing::TemporaryFolder folder;
  check_output_file("--report", "");
  check_output_file("--report", folder / "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "new"));
  std::ofstream(folder / "old") << "text";
  check_output_file("--report", folder / "old");
  EXPECT_EQ(text_in(folder / "old"), "text");
}

TEST(OutputFile, LeavesALinkToNothing) {
  const fsdp::testing::TemporaryFolder folder;
  std::filesystem::create_symlink(folder / "target", folder / "link");
  check_output_file("--report", folder / "link");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_FALSE(std::filesystem::exists(folder / "target"));
  write_text(folder / "link", "page");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(text_in(folder / "target"), "page");
  write_text(folder / "link", "another");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(text_in(folder / "target"), "another");
}

TEST(OutputFile, IsNotAnothersToo) {
  const fsdp::testing::TemporaryFolder folder;
  std::ofstream(folder / "old") << "text";
  std::filesystem::create_symlink(folder / "old", folder / "link");
  check_files_differ({{"--a", ""}, {"--b", ""}, {"--c", folder / "new"}, {"--d", folder / "old"}});
  for (const auto& [one, other] :
       {std::pair(folder / "new", folder / "new"), std::pair(folder / "new", folder / "./new"),
        std::pair(folder / "old", folder / "link")}) {
    expect_error<c10::ValueError>(
        [&] {
          check_files_differ({{"--report", one}, {"--x", folder / "x"}, {"--metrics", other}});
        },
        AllOf(StartsWith("--metrics: " + other), HasSubstr("--report, " + one)));
  }
}

TEST(OutputFile, IsReplacedOnceAllIsThere) {
  const fsdp::testing::TemporaryFolder folder;
  write_text(folder / "page", "old");
  write_output_file({"--report", folder / "page"}, [&](std::ostream& file) {
    file << "new" << std::flush;
    EXPECT_EQ(text_in(folder / "page"), "old");
  });
  EXPECT_EQ(text_in(folder / "page"), "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "page.tmp"));
  write_text("/dev/null", "nothing");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST(OutputFile, StaysWhereTheDiskIsFull) {
  const fsdp::testing::TemporaryFolder folder;
  write_text(folder / "page", "old");
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 4096;
  setrlimit(RLIMIT_FSIZE, &small);
  expect_error<c10::Error>([&] { write_text(folder / "page", std::string(100'000, 'x')); },
                           StartsWith("--report: " + (folder / "page") + " cannot be written"));
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(text_in(folder / "page"), "old");
  EXPECT_FALSE(std::filesystem::exists(folder / "page.tmp"));
}

TEST(NewFolder, IsTriedAndLeavesNothing) {
  const fsdp::testing::TemporaryFolder folder;
  for (const auto* path : {"new", "new/", "a/b/new"}) {
    EXPECT_NO_THROW(check_new_folder("--export", folder / path)) << path;
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << path;
  }
  write_text(folder / "file", "old");
  for (const auto& path : {folder / "file/new", std::string("/proc/new"), folder / "file"}) {
    expect_error<c10::ValueError>([&] { check_new_folder("--export", path); },
                                  StartsWith("--export: " + path));
  }
  EXPECT_EQ(text_in(folder / "file"), "old");
}

TEST(OutputFile, IsNoneOfWhatIsRead) {
  const fsdp::testing::TemporaryFolder folder;
  std::filesystem::create_directory(folder / "data");
  write_text(folder / "data/text", "words");
  const auto check = [&](const std::string& written, const std::string& read) {
    check_is_not_read({"--report", folder / written}, {"--data", folder / read});
  };
  for (const auto* path : {"data/text", "data/../data/text"}) {
    expect_error<c10::ValueError>([&] { check(path, "data/text"); }, StartsWith("--report: "));
    expect_error<c10::ValueError>([&] { check(path, "data"); }, StartsWith("--report: "));
  }
  expect_error<c10::ValueError>([&] { check("data", "data"); }, StartsWith("--report: "));
  EXPECT_NO_THROW(check("data/new", "data"));
  EXPECT_NO_THROW(check("page", "data"));
  EXPECT_NO_THROW(check_is_not_read({"--report", ""}, {"--data", folder / "data"}));
  EXPECT_NO_THROW(check_is_not_read({"--report", folder / "data/text"}, {"--data", ""}));
}

TEST(OutputFile, IsRefusedByItsFlag) {
  const fsdp::testing::TemporaryFolder folder;
  for (const auto& path : {folder / "no/folder", folder.path()}) {
    try {
      check_output_file("--report", path);
      ADD_FAILURE() << "no error for " << path;
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_EQ(text.find("--report: " + path + " cannot be written: "), 0u) << text;
    }
  }
}

}  // namespace
}  // namespace programs
