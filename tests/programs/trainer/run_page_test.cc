#include "programs/trainer/report/run_page.h"

#include "programs/trainer/setup/sharded_model.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

namespace programs {
namespace {

using fsdp::testing::expect_error;
using fsdp::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::internal::CaptureStderr;
using ::testing::internal::GetCapturedStderr;

std::string page_in(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void put(const std::string& path, const std::string& content) { std::ofstream(path) << content; }

TrainingOptions options_for(const std::string& report, int64_t steps) {
  TrainingOptions options;
  options.model = {
      .vocab = 64, .width = 32, .blocks = 1, .heads = 2, .kv_heads = 1, .max_tokens = 8};
  options.steps = steps;
  options.report = report;
  return options;
}

// The page and the model of a job of one rank.
void with_page(const TrainingOptions& options,
               const std::function<void(RunPage&, torch::nn::Module&)>& body) {
  fsdp::testing::run_ranks(1, [&](int64_t) {
    const auto mesh = mesh_of(options, 1);
    auto sharded = make_sharded_model(options, mesh);
    RunPage page(options, mesh, data_mesh_of(options, mesh));
    body(page, *sharded.model);
  });
}

// As many steps as that, from `first` on.
void do_steps(RunPage& page, int64_t first, int64_t count) {
  for (int64_t step = first; step < first + count; ++step)
    page.step(step, {{.loss = 5, .training_seconds = static_cast<double>(step)}});
}

TEST(RunPage, RefusesFilesOfOtherFlags) {
  const TemporaryFolder folder;
  const auto report = folder / "report.html";
  struct Case {
    std::string metrics, profile, one, other;
  };
  for (const auto& [metrics, profile, one, other] :
       {Case{report, "", "--report: " + report, "--metrics, " + report},
        Case{"", report, "--report: " + report, "--profile, " + report},
        Case{folder / "x", folder / "x", "--profile: " + (folder / "x"), "--metrics, "},
        Case{folder / "report.trace.rank1.json", "", "--metrics: ", "trace of --report, " + report},
        Case{"", folder / "report.trace.rank0.json", "--profile: ", "trace of --report, "}}) {
    auto options = options_for(report, 2);
    options.metrics = metrics;
    options.profile = profile;
    expect_error<c10::ValueError>([&] { check_files_of_page(options, 2); },
                                  AllOf(StartsWith(one), HasSubstr(other)));
  }
  auto options = options_for(report, 2);
  options.metrics = folder / "report.trace.rank2.json";  // of no rank
  options.profile = folder / "trace.json";
  check_files_of_page(options, 2);
  options.report = "";
  options.profile = "report.trace.rank0.json";
  check_files_of_page(options, 2);
}

TEST(RunPage, IsRefusedBeforeItWritesAnything) {
  const TemporaryFolder folder;
  put(folder / "r.trace.rank0.json", "{}");
  auto options = options_for(folder / "r.html", 2);
  options.profile = folder / "r.trace.rank0.json";
  expect_error([&] { with_page(options, [](auto&, auto&) {}); }, HasSubstr("a trace of --report"));
  EXPECT_EQ(page_in(folder / "r.trace.rank0.json"), "{}");
}

TEST(RunPage, OfARunIsWritten) {
  const TemporaryFolder folder;
  auto options = options_for(folder / "r.html", 3);
  options.profile = folder / "p.json";
  with_page(options, [](RunPage& page, torch::nn::Module& model) {
    page.start(0);
    do_steps(page, 1, 3);
    page.validated(3, 4.5);
    page.write(model);
  });
  const auto page = page_in(folder / "r.html");
  EXPECT_THAT(page, AllOf(HasSubstr(R"(["all units, unsharded and padded",)"),
                          HasSubstr(R"(["steps","3"])"), HasSubstr(R"("validations":[[3,4.5]])"),
                          HasSubstr("has no whole step")));
  EXPECT_THAT(page, ::testing::Not(HasSubstr(R"(["parameters",)")));
  EXPECT_EQ(page_in(folder / "p.json"), page_in(folder / "r.trace.rank0.json"));
}

TEST(RunPage, OfAFinishedRunStays) {
  const TemporaryFolder folder;
  for (const char* name : {"r.html", "r.trace.rank0.json", "p.json"}) put(folder / name, "good");
  auto options = options_for(folder / "r.html", 3);
  options.profile = folder / "p.json";
  CaptureStderr();
  with_page(options, [](RunPage& page, torch::nn::Module& model) {
    page.start(3);
    page.write(model);
  });
  EXPECT_THAT(GetCapturedStderr(),
              HasSubstr("--report: " + (folder / "r.html") + " is not written: no step was left"));
  for (const char* name : {"r.html", "r.trace.rank0.json", "p.json"})
    EXPECT_EQ(page_in(folder / name), "good") << name;
}

// Of nine steps those from the fourth on are profiled.
TEST(RunPage, KeepsOldTracesUntilItRecords) {
  const TemporaryFolder folder;
  const auto trace = folder / "r.trace.rank0.json";
  put(trace, "old");
  with_page(options_for(folder / "r.html", 9), [&](RunPage& page, torch::nn::Module&) {
    page.start(0);
    do_steps(page, 1, 2);
    EXPECT_EQ(page_in(trace), "old");
    do_steps(page, 3, 1);
    EXPECT_FALSE(std::filesystem::exists(trace));
  });
  put(trace, "old");
  with_page(options_for(folder / "r.html", 1), [&](RunPage& page, torch::nn::Module&) {
    page.start(0);
    EXPECT_FALSE(std::filesystem::exists(trace));
  });
}

// As on hosts without the folder in which rank 0 writes.
TEST(RunPage, NeedsNoFolderWhereItIsNotWritten) {
  const TemporaryFolder folder;
  CaptureStderr();
  with_page(options_for(folder / "elsewhere/r.html", 3), [](RunPage& page, torch::nn::Module&) {
    page.start(0);
    do_steps(page, 1, 3);
  });
  EXPECT_THAT(GetCapturedStderr(), IsEmpty());
}

TEST(RunPage, TellsOnceOfATraceThatCannotBeWritten) {
  const TemporaryFolder folder;
  auto options = options_for(folder / "r.html", 4);
  options.profile = folder / "p.json";
  std::string told;
  with_page(options, [&](RunPage& page, torch::nn::Module& model) {
    page.start(0);
    do_steps(page, 1, 1);
    std::filesystem::rename(folder.path(), folder.path() + ".moved");
    CaptureStderr();
    do_steps(page, 2, 3);
    std::filesystem::rename(folder.path() + ".moved", folder.path());
    page.write(model);
    told = GetCapturedStderr();
  });
  const auto first = told.find("--report: rank 0 has no trace: ");
  ASSERT_NE(first, std::string::npos) << told;
  EXPECT_EQ(told.find("has no trace", first + 30), std::string::npos) << told;
  EXPECT_THAT(told, HasSubstr("--profile: " + (folder / "p.json") + " is not written: " +
                              (folder / "r.trace.rank0.json") + " is not there"));
  EXPECT_FALSE(std::filesystem::exists(folder / "p.json"));
  EXPECT_THAT(page_in(folder / "r.html"), HasSubstr("r.trace.rank0.json is not there"));
}

}  // namespace
}  // namespace programs
