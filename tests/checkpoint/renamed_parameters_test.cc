// Checkpoints whose names are not the model's, such as those that Hugging Face has.
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/safetensors.h"
#include "tests/checkpoint/python.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// tests/checkpoint/fixtures/read_renamed.py says the same.
std::string published_name(const std::string& name) {
  const std::map<std::string, std::string> parts = {
      {"first", "model.layers.0.self_attn.q_proj"}, {"norm", "model.norm"}, {"last", "lm_head"}};
  const size_t dot = name.find('.');
  if (dot == std::string::npos) return "model." + name;
  return parts.at(name.substr(0, dot)) + name.substr(dot);
}

std::string own_name(const std::string& published) {
  SmallModel model;
  for (const auto& item : full_values(*model)) {
    if (published_name(item.key()) == published) return item.key();
  }
  ADD_FAILURE() << published << " is the name of nothing";
  return published;
}

std::set<std::string> names_in(const std::string& file) {
  using namespace internal::checkpoint;
  const Header header = read_header(InputFile::open(file).value()).value();
  std::set<std::string> names;
  for (const auto& entry : header.entries) names.insert(entry.name);
  return names;
}

std::set<std::string> published_names() {
  SmallModel model;
  std::set<std::string> names;
  for (const auto& item : full_values(*model)) names.insert(published_name(item.key()));
  return names;
}

struct RenamedRun {
  RenamedRun(int64_t world, double lr) {
    shard_small_model(model, init_device_mesh(torch::kCPU, {world}));
    fill(*model, 1);
    model->eval();
    optimizer =
        std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(lr));
  }
  State state() { return {.model = model, .optimizer = *optimizer}; }
  void step() {
    optimizer->zero_grad();
    model->forward(torch::ones({4, 5})).pow(2).mean().backward();
    optimizer->step();
  }
  SmallModel model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

// A run that has stepped and one that was loaded from what it saved step on alike.
void expect_step_alike(RenamedRun& from, RenamedRun& to) {
  EXPECT_EQ(to.optimizer->param_groups()[0].options().get_lr(),
            from.optimizer->param_groups()[0].options().get_lr());
  from.step();
  to.step();
  const auto want = full_values(*from.model);
  for (const auto& item : full_values(*to.model)) {
    EXPECT_TRUE(torch::equal(item.value(), want[item.key()])) << item.key();
  }
}

TEST(Renamed, ModelAndOptimizerAreReadBackByTheSameFunction) {
  for (const Layout layout : {Layout::kSharded, Layout::kFull}) {
    for (const int64_t world : {1, 2, 3}) {
      TemporaryFolder folder;
      run_ranks(world, [&](int64_t) {
        RenamedRun from(world, 0.25), to(world, 7.0);
        from.step();
        save(from.state(), folder / "saved", {.layout = layout, .name_in_file = published_name});
        EXPECT_THAT(message_of([&] { load({.model = to.model}, folder / "saved"); }),
                    HasSubstr("missing in the file: frozen, unused, first.weight"));
        load(to.state(), folder / "saved", {.name_in_file = published_name});
        expect_step_alike(from, to);
      });
      verify_checkpoint(folder / "saved");
    }
  }
}

TEST(Renamed, FilesHaveTheNewNamesAlone) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    RenamedRun run(2, 0.25);
    run.step();
    save(run.state(), folder / "saved", {.layout = Layout::kFull, .name_in_file = published_name});
  });
  EXPECT_EQ(names_in(folder / "saved/model/model.safetensors"), published_names());
  const auto state = names_in(folder / "saved/optimizer/model.safetensors");
  EXPECT_EQ(state.count("state.model.layers.0.self_attn.q_proj.weight.exp_avg"), 1u);
  for (const auto& name : state) {
    EXPECT_TRUE(name.starts_with("state.model.") || name.starts_with("state.lm_head.")) << name;
  }
}

TEST(Renamed, PythonReadsThePublishedNames) {
  if (!python_has_torch()) GTEST_SKIP() << kNoPython;
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    RenamedRun run(2, 0.25);
    save({.model = run.model}, folder / "one",
         {.layout = Layout::kFull, .name_in_file = published_name});
    save({.model = run.model}, folder / "several",
         {.layout = Layout::kFull, .max_file_bytes = 100, .name_in_file = published_name});
    save({.model = run.model}, folder / "sharded", {.name_in_file = published_name});
  });
  const std::string folders =
      (folder / "one") + " " + (folder / "several") + " " + (folder / "sharded");
  EXPECT_EQ(run_python("read_renamed.py", folders), 0);
}

TEST(Renamed, ConversionsRenameModelsAndOptimizersThereAndBack) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t) {
    RenamedRun from(2, 0.25);
    from.step();
    save(from.state(), folder / "saved");
  });
  convert_checkpoint(folder / "saved", folder / "export", {.name_in_file = published_name});
  EXPECT_EQ(names_in(folder / "export/model/model.safetensors"), published_names());
  convert_checkpoint(folder / "export", folder / "back",
                     {.layout = Layout::kSharded, .ranks = 3, .name_in_file = own_name});
  run_ranks(3, [&](int64_t) {
    RenamedRun from(3, 7.0), published(3, 7.0), back(3, 7.0);
    load(from.state(), folder / "saved");
    load(published.state(), folder / "export", {.name_in_file = published_name});
    load(back.state(), folder / "back");
    expect_step_alike(from, published);
    load(from.state(), folder / "saved");
    expect_step_alike(from, back);
  });
}

// Its state has lists of tensors, whose names end in numbers.
TEST(Renamed, StateThatIsListsKeepsItsPlaces) {
  TemporaryFolder folder;
  const auto numbered = [](const std::string& name) { return name + ".0"; };
  const auto step = [](torch::nn::Linear& model, torch::optim::LBFGS& optimizer) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const auto loss = (model->forward(torch::ones({1, 3})) - 1).pow(2).sum();
      loss.backward();
      return loss;
    });
  };
  const auto options = torch::optim::LBFGSOptions(0.1).max_iter(3);
  torch::nn::Linear from(3, 2), to(3, 2);
  torch::optim::LBFGS optimizer(from->parameters(), options), other(to->parameters(), options);
  step(from, optimizer);
  save({.model = from, .optimizer = optimizer}, folder / "saved", {.name_in_file = numbered});
  const auto names = names_in(folder / "saved/optimizer/model.safetensors");
  EXPECT_EQ(names.count("state.weight.0.old_dirs.0"), 1u) << ::testing::PrintToString(names);
  load({.model = to, .optimizer = other}, folder / "saved", {.name_in_file = numbered});
  step(from, optimizer);
  step(to, other);
  EXPECT_TRUE(torch::equal(from->weight, to->weight));
}

struct SharedTableImpl : torch::nn::Module {
  SharedTableImpl() {
    table = register_parameter("table", torch::rand({4, 2}));
    head = register_parameter("head", table);
    other = register_parameter("other", torch::rand({4, 2}));
  }
  torch::Tensor table, head, other;
};
TORCH_MODULE(SharedTable);

TEST(Renamed, TheNamesOfOneTensorMayBecomeOneOrStayTwo) {
  TemporaryFolder folder;
  const auto numbers = [](const std::string& name) { return name == "other" ? "2" : "1"; };
  const auto longer = [](const std::string& name) { return "model." + name; };
  SharedTable model, merged, tied;
  save({.model = model}, folder / "merged", {.name_in_file = numbers});
  EXPECT_EQ(names_in(folder / "merged/model/model.safetensors"), (std::set<std::string>{"1", "2"}));
  load({.model = merged}, folder / "merged", {.name_in_file = numbers});
  EXPECT_TRUE(torch::equal(merged->head, model->table));
  EXPECT_TRUE(torch::equal(merged->other, model->other));
  save({.model = model}, folder / "tied", {.name_in_file = longer});
  load({.model = tied}, folder / "tied", {.name_in_file = [](const std::string& name) {
         return name == "table" ? "model.head" : "model." + name;  // by the other name
       }});
  EXPECT_TRUE(torch::equal(tied->table, model->table));
  EXPECT_THAT(message_of([&] {
                save({.model = model}, folder / "wrong", {.name_in_file = [](const auto& name) {
                       return name == "head" ? "other" : name;
                     }});
              }),
              AllOf(HasSubstr("'other' and 'head' of 'model', which are two tensors"),
                    HasSubstr("one name: 'other'")));
}

TEST(Renamed, TensorsOfTheStateAreRenamedToo) {
  TemporaryFolder folder;
  const auto ema = [](const std::string& name) { return "ema." + name; };
  const auto saved = torch::rand({3}), loaded = torch::zeros({3});
  save({.tensors = {{"w", saved}}}, folder / "saved", {.name_in_file = ema});
  EXPECT_EQ(names_in(folder / "saved/tensors/model.safetensors"), std::set<std::string>{"ema.w"});
  load({.tensors = {{"w", loaded}}}, folder / "saved", {.name_in_file = ema});
  EXPECT_TRUE(torch::equal(saved, loaded));
}

TEST(Renamed, NamesThatCannotBeAreRefusedOnAllRanksAndNothingIsWritten) {
  TemporaryFolder folder;
  run_ranks(2, [&](int64_t rank) {
    RenamedRun run(2, 0.25);
    const auto refusal = [&](Layout layout, std::function<std::string(const std::string&)> names) {
      return message_of<c10::ValueError>([&] {
        save(run.state(), folder / "saved", {.layout = layout, .name_in_file = std::move(names)});
      });
    };
    for (const Layout layout : {Layout::kSharded, Layout::kFull}) {
      EXPECT_THAT(refusal(layout,
                          [](const std::string& name) {
                            return name.starts_with("first") ? "q_proj" : name;
                          }),
                  AllOf(HasSubstr("rank 1: SaveOptions::name_in_file gives 'first.weight' and "
                                  "'first.bias' of 'model', which are two tensors, one name: "),
                        HasSubstr("'q_proj'")));
      EXPECT_THAT(refusal(layout, [](const std::string&) { return std::string(); }),
                  HasSubstr("gives 'frozen' of 'model' an empty name"));
      EXPECT_THAT(refusal(layout, [](const std::string&) { return std::string("__metadata__"); }),
                  HasSubstr("safetensors files keep for themselves"));
      const std::map<std::string, std::string> table = {{"frozen", "model.frozen"}};
      EXPECT_THAT(message_of([&] {
                    save(run.state(), folder / "saved",
                         {.layout = layout,
                          .name_in_file = [&](const std::string& name) { return table.at(name); }});
                  }),
                  HasSubstr("rank 1: map::at"));
    }
    const auto own = "rank" + std::to_string(rank) + ".";
    EXPECT_THAT(refusal(Layout::kSharded, [&](const std::string& name) { return own + name; }),
                AllOf(HasSubstr("of which rank 1 does not save it"),
                      HasSubstr("the same names on all ranks")));
    EXPECT_THAT(message_of([&] {
                  SaveOptions options;
                  if (rank == 1) options.name_in_file = published_name;
                  save(run.state(), folder / "saved", options);
                }),
                HasSubstr("rank 1 gives another options than rank 0"));
  });
  EXPECT_TRUE(fs::is_empty(folder.path()));
  save({.tensors = {{"a", torch::ones({1})}, {"b", torch::ones({1})}}}, folder / "saved");
  EXPECT_THAT(message_of([&] {
                convert_checkpoint(folder / "saved", folder / "to",
                                   {.name_in_file = [](const std::string&) { return "one"; }});
              }),
              HasSubstr("ConvertOptions::name_in_file gives 'a' and 'b' of 'tensors'"));
  EXPECT_FALSE(fs::exists(folder / "to"));
}

}  // namespace
}  // namespace fsdp::testing
