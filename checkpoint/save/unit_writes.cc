#include "checkpoint/save/unit_writes.h"

#include "checkpoint/files/checksums.h"
#include "device_mesh/rendezvous/presence.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/transport/comm_context.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// What one rank says of one unit, in the order of its text.
enum Field : size_t {
  kMesh,
  kNumber,
  kPlace,
  kReplicas,
  kShards,
  kWriting,
  kReplica,
  kHasPieces,  // HFSDP
  kPieces,     // as kWriting, of the outer ranks
  kOperators,
  kName
};

std::string text_of_mesh(const DeviceMesh& mesh) {
  return checksum_text(c10::str(mesh.shape(), " of ", mesh.ranks()));
}

int64_t place_in(const DeviceMesh& mesh) {
  const auto found = std::find(mesh.ranks().begin(), mesh.ranks().end(), mesh.rank());
  return found - mesh.ranks().begin();
}

// Shards that ranks read by themselves are compared by all write operators so far, since
// no gather ends a run of writes on all ranks.
Json said_of(FSDPParamGroup& group) {
  const auto* const shared = group.shards().shared();
  const auto& mesh = group.info().mesh();
  const int64_t shards = mesh.size(shard_mesh_dim(mesh));
  const bool has_pieces = group.info().has_pieces();
  return {text_of_mesh(mesh),
          group.info().number(),
          place_in(mesh),
          mesh.size() / shards,
          shards,
          shared ? 0 : group.agreement().words().writing,
          has_pieces ? 0 : group.agreement().word_for_replicas().writing,
          has_pieces,
          has_pieces ? group.agreement().words_for_pieces().writing : 0,
          shared ? shared->operators() : 0,
          group.info().name()};
}

// A unit on all ranks of its mesh, by place.
struct SavedUnit {
  std::vector<int64_t> ranks;  // of the world; -1: it does not save the unit
  std::vector<Holders> writing, writing_pieces;
  std::vector<bool> replica_wrote;  // as far as the rank knows
  std::vector<uint64_t> operators;
  int64_t replicas = 1, shards = 1;
  bool has_pieces = false;
  std::string name;

  explicit SavedUnit(const Json& said)
      : replicas(said.at(kReplicas)),
        shards(said.at(kShards)),
        has_pieces(said.at(kHasPieces)),
        name(said.at(kName)) {
    const auto places = static_cast<size_t>(replicas * shards);
    ranks.assign(places, -1);
    writing.assign(places, 0);
    writing_pieces.assign(places, 0);
    replica_wrote.assign(places, false);
    operators.assign(places, 0);
  }
  void add(const Json& said, int64_t rank) {
    const size_t place = said.at(kPlace);
    ranks[place] = rank;
    writing[place] = said.at(kWriting);
    writing_pieces[place] = said.at(kPieces);
    replica_wrote[place] = said.at(kReplica) == ReplicaWrites::kWrote;
    operators[place] = said.at(kOperators);
  }
  bool is_on_all_ranks() const { return std::count(ranks.begin(), ranks.end(), -1) == 0; }
  std::vector<Holders> writing_in(int64_t replica) const {
    const auto first = writing.begin() + replica * shards;
    return {first, first + shards};
  }
  std::vector<Holders> writing_pieces_of(int64_t shard) const {
    std::vector<Holders> words;
    for (int64_t replica = 0; replica < replicas; ++replica)
      words.push_back(writing_pieces[static_cast<size_t>(replica * shards + shard)]);
    return words;
  }
  bool wrote(size_t place) const { return writing[place] != 0 || replica_wrote[place]; }
};

// By mesh and number.
using Units = std::map<std::pair<std::string, int64_t>, SavedUnit>;

Units units_in(const std::vector<std::string>& texts) {
  Units units;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    for (const auto& said : Json::parse(texts[rank])) {
      const std::pair<std::string, int64_t> unit(said.at(kMesh), said.at(kNumber));
      units.try_emplace(unit, said).first->second.add(said, static_cast<int64_t>(rank));
    }
  }
  return units;
}

[[noreturn]] void refuse(const SavedUnit& unit, const std::vector<bool>& wrote,
                         const std::string& what) {
  std::vector<int64_t> with, without;
  for (size_t place = 0; place < wrote.size(); ++place)
    (wrote[place] ? with : without).push_back(unit.ranks[place]);
  TORCH_CHECK_VALUE(false, what, ": not all ranks wrote the shards of unit '", unit.name,
                    "' alike before the save: ", ranks_text(with), " did, and not ",
                    ranks_text(without),
                    ", so that the checkpoint would mix two models. A rank that skips "
                    "optimizer.step(), or writes a parameter alone, goes on with another model "
                    "than the others: decide together, with an all-reduce of the flag. Nothing "
                    "was saved; every rank gets this error");
}

void check_unit(const SavedUnit& unit, const std::string& what) {
  std::vector<bool> wrote, of_replica;
  for (size_t place = 0; place < unit.ranks.size(); ++place) wrote.push_back(unit.wrote(place));
  for (int64_t replica = 0; replica < unit.replicas; ++replica) {
    const auto words = unit.writing_in(replica);
    if (!WriteRuns::all_took_part(words)) {
      for (size_t place = 0; place < wrote.size(); ++place) wrote[place] = unit.writing[place] != 0;
      refuse(unit, wrote, what);
    }
    const auto first = wrote.begin() + replica * unit.shards;
    of_replica.push_back(std::find(first, first + unit.shards, true) != first + unit.shards);
  }
  for (int64_t shard = 0; shard < unit.shards; ++shard) {
    if (WriteRuns::all_took_part(unit.writing_pieces_of(shard))) continue;
    for (size_t place = 0; place < wrote.size(); ++place)
      wrote[place] = unit.writing_pieces[place] != 0;
    refuse(unit, wrote, what);
  }
  const auto most = *std::max_element(unit.operators.begin(), unit.operators.end());
  for (size_t place = 0; place < wrote.size(); ++place)
    wrote[place] = unit.operators[place] == most;
  if (std::count(wrote.begin(), wrote.end(), false) > 0) refuse(unit, wrote, what);
  if (unit.has_pieces) return;  // a replica that holds none of what was written is silent
  const bool alike = std::set<bool>(of_replica.begin(), of_replica.end()).size() == 1;
  for (size_t place = 0; place < wrote.size(); ++place)
    wrote[place] = of_replica[place / static_cast<size_t>(unit.shards)];
  if (!alike) refuse(unit, wrote, what);
}

}  // namespace

UnitWrites::UnitWrites(const std::vector<SaveItem>& items) {
  std::set<const FSDPParamGroup*> seen;
  for (const SaveItem& item : items) {
    if (item.kind != "model") continue;
    for (const NamedTensor& each : item.tensors) {
      const auto group = find_managed_tensor(each.tensor).group;
      // On devices gathers end no run of writes.
      if (group && group->info().comm_context().transport().checks_stamps() &&
          seen.insert(group.get()).second)
        units_.push_back(said_of(*group));
    }
  }
}

std::string UnitWrites::fingerprint() const {
  Json words = Json::array();
  for (const auto& unit : units_)
    words.push_back({unit.at(kWriting), unit.at(kReplica), unit.at(kPieces), unit.at(kOperators)});
  return checksum_text(words.dump());
}

void UnitWrites::check(const std::vector<std::string>& texts, const std::string& what) {
  for (const auto& [key, unit] : units_in(texts)) {
    if (unit.is_on_all_ranks()) check_unit(unit, what);
  }
}

}  // namespace fsdp::internal::checkpoint
