// What the ranks of a device mesh tell each other on the host at the end of a backward
// (fully_shard/host_exchange.h), first those that shard, then the replicas:
//
//   of the whole      whether gradients came late; a hash of the values that must be alike
//   of each group     who holds what was written since the last time
//   of each reduction which parameters were used; of those over replicas, whether this one wrote
//
// A rank that found something wrong among those that shard still tells its replicas, so
// no rank waits for one that has thrown.
#define XXH_INLINE_ALL
#include "fully_shard/step/backward_run.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/transport/host_exchange.h"

#include <c10/util/Exception.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using Words = HostExchange::Words;
using Groups = std::vector<FSDPParamGroup*>;
using Used = std::vector<std::vector<bool>>;  // by reduction and parameter

enum Status : uint64_t { kFine = 0, kFailed = 1 };

void append_bits(Words& words, const std::vector<bool>& bits) {
  words.resize(words.size() + (bits.size() + 63) / 64);
  const auto first = words.end() - static_cast<std::ptrdiff_t>((bits.size() + 63) / 64);
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) first[static_cast<std::ptrdiff_t>(i / 64)] |= uint64_t{1} << (i % 64);
  }
}

// One rank's words, in the order in which they were appended.
class Reader {
 public:
  explicit Reader(const Words& words) : words_(words) {}
  uint64_t next() { return words_.at(next_++); }
  void raise(std::vector<bool>& bits) {
    for (size_t i = 0; i < bits.size(); ++i) {
      if ((words_.at(next_ + i / 64) >> (i % 64) & 1) != 0) bits[i] = true;
    }
    next_ += (bits.size() + 63) / 64;
  }

 private:
  const Words& words_;
  size_t next_ = 0;
};

Groups groups_of(const std::set<std::shared_ptr<Root>>& roots, const CommContext& comm_context) {
  Groups groups;
  for (const auto& root : roots) {
    for (const auto& [unit, group] : root->groups()) {
      if (&group->info().comm_context() == &comm_context) groups.push_back(group);
    }
  }
  std::sort(groups.begin(), groups.end(),
            [](const auto* a, const auto* b) { return a->info().number() < b->info().number(); });
  return groups;
}

// Of those that have anything to compare.
template <class Select>
uint64_t hash_of_values(const Groups& groups, const Select& select) {
  uint64_t hash = 0;
  for (auto* group : groups) {
    const auto word = group->agreement().words_since_exchange().agreement;
    if (word == 0 || !select(*group)) continue;
    const uint64_t said[] = {group->info().number(), word};
    hash = XXH3_64bits_withSeed(said, sizeof said, hash);
  }
  return hash;
}

class Exchange {
 public:
  Exchange(Groups groups, std::span<GradientReduction> reductions, bool late)
      : groups_(std::move(groups)), reductions_(reductions), late_(late) {
    for (const auto& reduction : reductions_) used_.push_back(reduction.input().used_here());
  }

  // shards: null where one rank has all of them.
  bool run(HostExchange* shards) {
    attempt([&] { over_shards(shards); });
    for (auto* const replicas : transports_to_replicas())
      attempt([&] { over_replicas(*replicas); });
    if (failure_) std::rethrow_exception(failure_);
    for (size_t i = 0; i < reductions_.size(); ++i) reductions_[i].set_used(used_[i]);
    for (auto* group : groups_) group->agreement().exchanged();
    return late_;
  }

 private:
  // The first failure is the one that is thrown.
  template <class Call>
  void attempt(const Call& call) {
    try {
      call();
    } catch (const std::exception&) {
      if (!failure_) failure_ = std::current_exception();
    }
  }
  void over_shards(HostExchange* shards);
  void over_replicas(Transport& replicas);
  // What the ranks say of the whole: raises late_, and gives whether all have that hash.
  bool hear_whole(std::vector<Reader>& ranks, uint64_t hash);
  void check_writes(std::vector<Reader>& ranks);
  std::vector<Transport*> transports_to_replicas() const;

  Groups groups_;
  std::span<GradientReduction> reductions_;
  bool late_;
  Used used_;
  std::exception_ptr failure_;
};

std::vector<Reader> readers_of(const std::vector<Words>& of_ranks) {
  return {of_ranks.begin(), of_ranks.end()};
}

void Exchange::over_shards(HostExchange* shards) {
  const auto hash = hash_of_values(groups_, [](const auto&) { return true; });
  Words words = {late_, hash};
  for (auto* group : groups_) words.push_back(group->agreement().words_since_exchange().writing);
  for (const auto& bits : used_) append_bits(words, bits);

  const auto all = shards != nullptr ? shards->run(words) : std::vector<Words>{words};
  auto ranks = readers_of(all);
  if (!hear_whole(ranks, hash)) {
    for (auto* group : groups_)
      group->agreement().check_values_along(shard_mesh_dim(group->info().mesh()));
  }
  check_writes(ranks);
  for (auto& rank : ranks) {
    for (auto& bits : used_) rank.raise(bits);
  }
}

bool Exchange::hear_whole(std::vector<Reader>& ranks, uint64_t hash) {
  bool is_alike = true;
  for (auto& rank : ranks) {
    late_ |= rank.next() != 0;
    is_alike &= rank.next() == hash;
  }
  return is_alike;
}

void Exchange::check_writes(std::vector<Reader>& ranks) {
  std::vector<std::vector<NoticeWords>> of_groups(groups_.size());
  for (auto& rank : ranks) {
    for (auto& said : of_groups) said.push_back({.writing = rank.next()});
  }
  for (size_t i = 0; i < groups_.size(); ++i)
    groups_[i]->agreement().check_writes_since_exchange(of_groups[i]);
}

// In the order in which they are met first.
std::vector<Transport*> Exchange::transports_to_replicas() const {
  std::vector<Transport*> transports;
  for (const auto& reduction : reductions_) {
    auto* const replicas = reduction.group().info().replicas();
    const bool is_known =
        std::find(transports.begin(), transports.end(), replicas) != transports.end();
    if (reduction.is_over_replicas() && replicas->host_exchange() != nullptr && !is_known)
      transports.push_back(replicas);
  }
  return transports;
}

void Exchange::over_replicas(Transport& replicas) {
  const auto goes_there = [&](const GradientReduction& reduction) {
    return reduction.is_over_replicas() && reduction.group().info().replicas() == &replicas;
  };
  const auto hash = hash_of_values(groups_, [&](FSDPParamGroup& group) {
    return group.info().replicas() == &replicas && group.agreement().values().is_of_all_ranks();
  });
  Words words = {failure_ ? kFailed : kFine};
  if (!failure_) {
    words.insert(words.end(), {late_, hash});
    for (size_t i = 0; i < reductions_.size(); ++i) {
      if (!goes_there(reductions_[i])) continue;
      words.push_back(reductions_[i].group().agreement().word_for_replicas().writing);
      append_bits(words, used_[i]);
    }
  }

  const auto all = replicas.host_exchange()->run(words);
  if (failure_) return;
  auto ranks = readers_of(all);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    TORCH_CHECK_VALUE(ranks[rank].next() != kFailed, "the ranks of replica ", rank,
                      " differ, and name what differs; every rank gets an error, and no gradient "
                      "of this backward is published (rank ",
                      reductions_.front().group().info().rank(), ")");
  }
  if (!hear_whole(ranks, hash)) {
    for (auto* group : groups_) {
      if (group->info().replicas() == &replicas)
        group->agreement().check_values_along(*replicate_mesh_dim(group->info().mesh()));
    }
  }
  for (size_t i = 0; i < reductions_.size(); ++i) {
    if (!goes_there(reductions_[i])) continue;
    std::vector<NoticeWords> wrote;
    for (auto& rank : ranks) {
      wrote.push_back({.writing = rank.next()});
      rank.raise(used_[i]);
    }
    reductions_[i].set_words_of_replicas(std::move(wrote));
  }
}

}  // namespace

bool exchange_after_backward(const std::set<std::shared_ptr<Root>>& roots,
                             std::span<GradientReduction> reductions, bool late) {
  auto& comm_context = reductions.front().group().info().comm_context();
  return Exchange(groups_of(roots, comm_context), reductions, late)
      .run(comm_context.transport().host_exchange());
}

}  // namespace fsdp::internal
