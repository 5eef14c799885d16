#include "programs/trainer/report/page/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>

namespace programs::run_report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

nlohmann::json data_in(const std::string& page) {
  const std::string element = R"(<script type="application/json" id="run">)";
  const auto begin = page.find(element) + element.size();
  return nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

Run small_run() {
  Run run{.title = "A run"};
  run.steps = {{1, 5.5, 1000, 0.25, 4096}, {2, 5.25, 1100, 0.125, 8192}};
  run.validations = {{2, 5.0}};
  run.bound = 8192;
  run.units = {{.unit = {.name = "block0", .parameters = 2, .bytes = 64}, .gathers = 2}};
  RankStep step{.number = 2, .clock = 7, .seconds = 0.5};
  step.phases = {{"forward", 0, 0.25}};
  step.gathers = {{{"block0", 0.125, 0.25}, true, true, 32, 0.0625}};
  step.redistributions = {{"all-gather over tp", 0.25, 0.5}};
  run.timelines = {{0, step, ""}, {1, std::nullopt, "x.json is not there"}};
  run.timelines.push_back(run.timelines[0]);
  run.timelines[2].step->clock = 6.5;
  run.advice = {{"Do this", "since that"}};
  return run;
}

TEST(Page, NeedsNoOtherFile) {
  const auto page = page_of(small_run());
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("<link")));
  EXPECT_THAT(page, Not(HasSubstr("RUN_DATA")));
  EXPECT_THAT(page, HasSubstr("Chart.js v"));
}

TEST(Page, HasTheDataOfTheRun) {
  const auto json = data_in(page_of(small_run()));
  EXPECT_EQ(json["title"], "A run");
  EXPECT_EQ(json["steps"][1]["loss"], 5.25);
  EXPECT_EQ(json["validations"][0], (nlohmann::json{2, 5.0}));
  EXPECT_EQ(json["bound"], 8192);
  EXPECT_EQ(json["units"][0]["name"], "block0");
  EXPECT_EQ(json["advice"][0]["reason"], "since that");
  auto run = small_run();
  run.bound.reset();
  EXPECT_TRUE(data_in(page_of(run))["bound"].is_null());
}

TEST(Page, PutsTheRanksOnOneClock) {
  const auto timelines = data_in(page_of(small_run()))["timelines"];
  EXPECT_EQ(timelines[2]["begin"], 0);
  EXPECT_EQ(timelines[0]["begin"], 500);  // milliseconds
  EXPECT_EQ(timelines[0]["end"], 1000);
  EXPECT_EQ(timelines[0]["gathers"][0], (nlohmann::json{"block0", 625, 750, true, true, 32, 62.5}));
  EXPECT_EQ(timelines[0]["phases"][0], (nlohmann::json{"forward", 500, 750}));
  EXPECT_EQ(timelines[0]["redistributions"][0], (nlohmann::json{"all-gather over tp", 750, 1000}));
  EXPECT_EQ(timelines[1]["missing"], "x.json is not there");
}

TEST(Page, IsNotEndedByANameInIt) {
  for (const std::string name :
       {"</script><script>alert(1)</script>", "<!-- <script>", "\xff\xfe"}) {
    auto run = small_run();
    const auto plain = page_of(run);
    run.units[0].unit.name = run.title = name;
    const auto page = page_of(run);
    const auto count = [](const std::string& text, const std::string& part) {
      size_t found = 0;
      for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
        ++found;
      return found;
    };
    for (const char* part : {"</script", "<script", "<!--"})
      EXPECT_EQ(count(page, part), count(plain, part)) << name << ": " << part;
    const auto shown = name.front() == '<' ? name : "\ufffd\ufffd";
    EXPECT_EQ(data_in(page)["units"][0]["name"], shown);
  }
}

}  // namespace
}  // namespace programs::run_report
