// ShardWrites against a model that keeps the values themselves: a shard and a copy per
// parameter, and what a graph saw, each a number that every write makes new.
#include "fully_shard/params/shard_writes.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <vector>

namespace fsdp::internal {
namespace {

struct ModelOfWrites {
  struct Param {
    int shard = 0;
    std::optional<int> copy = {};   // what the copy holds; none: it may not be read
    std::optional<int> graph = {};  // what the last graph saw of the shard
    bool dirty = false;
  };
  std::vector<Param> params;
  int next = 1;
  bool written_since_graph = false, has_graph = false;

  explicit ModelOfWrites(size_t count) : params(count) {}
  bool dirty() const {
    for (const auto& param : params) {
      if (param.dirty) return true;
    }
    return false;
  }
  // A write to one shard makes every copy of the group old: gathers are of all.
  void shard_written() {
    params[0].shard = next++;
    for (auto& param : params) param.copy.reset();
    written_since_graph = true;
  }
  void filled() {
    for (auto& param : params) param.copy = param.shard;
  }
  void emptied() {
    for (auto& param : params) param.copy.reset();
  }
  void copy_written(size_t i) {
    params[i].dirty = true;
    params[i].copy = next++;
  }
  std::vector<size_t> write_back() {
    std::vector<size_t> written;
    for (size_t i = 0; i < params.size(); ++i) {
      if (!params[i].dirty) continue;
      params[i].shard = *params[i].copy;
      params[i].dirty = false;
      written.push_back(i);
    }
    emptied();  // other ranks wrote their parts, which only a gather brings
    written_since_graph = true;
    return written;
  }
  void discarded() {
    for (auto& param : params) param.dirty = false;
    emptied();
  }
};

int compared = 0;

void compare(const ShardWrites& writes, const ModelOfWrites& model) {
  ++compared;
  ASSERT_EQ(writes.is_dirty(), model.dirty());
  for (size_t i = 0; i < model.params.size(); ++i) {
    ASSERT_EQ(writes.is_dirty(i), model.params[i].dirty);
    // While something is dirty the copy counts as what it is: the newest, or stale below
    // it.
    if (!model.dirty()) {
      ASSERT_EQ(writes.is_stale(), !model.params[i].copy.has_value());
    }
  }
  ASSERT_EQ(writes.graph_is_current(), !model.has_graph || !model.written_since_graph);
}

void explore(const ShardWrites& writes, const ModelOfWrites& model, int depth) {
  compare(writes, model);
  if (depth == 0 || ::testing::Test::HasFatalFailure()) return;
  const auto branch = [&](const auto& on_writes, const auto& on_model) {
    auto next_writes = writes;
    auto next_model = model;
    on_writes(next_writes);
    on_model(next_model);
    explore(next_writes, next_model, depth - 1);
  };
  branch([](auto& w) { w.graph_recorded(); },
         [](auto& m) { m.has_graph = true, m.written_since_graph = false; });
  branch([](auto& w) { w.graph_done(); }, [](auto& m) { m.has_graph = false; });
  branch([](auto& w) { w.copy_discarded(); }, [](auto& m) { m.discarded(); });
  if (model.dirty()) {
    for (const auto refused :
         {&ShardWrites::shard_written, &ShardWrites::copy_filled, &ShardWrites::copy_emptied}) {
      auto copy = writes;
      EXPECT_THROW((copy.*refused)(), std::logic_error);
    }
  } else {
    branch([](auto& w) { w.shard_written(); }, [](auto& m) { m.shard_written(); });
    branch([](auto& w) { w.copy_filled(); }, [](auto& m) { m.filled(); });
    branch([](auto& w) { w.copy_emptied(); }, [](auto& m) { m.emptied(); });
  }
  // The members can be written while there is a copy.
  for (size_t i = 0; i < model.params.size(); ++i) {
    if (!model.params[i].copy) continue;
    branch([i](auto& w) { w.copy_written(i); }, [i](auto& m) { m.copy_written(i); });
  }
  if (model.dirty()) {
    auto next_writes = writes;
    auto next_model = model;
    ASSERT_EQ(next_writes.write_back(), next_model.write_back());
    explore(next_writes, next_model, depth - 1);
  }
}

TEST(ShardWrites, AgreesWithAModelOfValuesInEverySequenceOfSixEvents) {
  for (size_t params = 1; params <= 3; ++params) {
    compared = 0;
    explore(ShardWrites(), ModelOfWrites(params), 6);
    EXPECT_GT(compared, 1000);
  }
}

}  // namespace
}  // namespace fsdp::internal
