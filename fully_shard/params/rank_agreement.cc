#include "fully_shard/params/rank_agreement.h"

#include "fully_shard/transport/mesh_dims.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// Where the outer rank that did not write its pieces is in a word; that rank + 1.
constexpr int kSilentOuterRank = 32;

constexpr char kDecideTogether[] =
    ". A rank that skips optimizer.step(), or writes a parameter alone, goes on with another "
    "model than the others: decide together, with an all-reduce of the flag. Once every rank "
    "has written or loaded these shards, training goes on; every rank gets this error (rank ";

bool all_are(uint64_t word, const std::vector<uint64_t>& words) {
  return std::all_of(words.begin(), words.end(), [word](uint64_t other) { return other == word; });
}

std::vector<Holders> writing_in(const std::vector<NoticeWords>& words) {
  std::vector<Holders> all;
  for (const auto& each : words) all.push_back(static_cast<Holders>(each.writing));
  return all;
}

std::vector<int64_t> ranks_that_shard(const DeviceMesh& mesh) {
  const auto count = mesh.size(shard_mesh_dim(mesh));
  const auto first = mesh.ndim() == 2 ? mesh.coordinate()[0] * count : 0;
  return {mesh.ranks().begin() + first, mesh.ranks().begin() + first + count};
}

// "ranks 0, 4": those that have this rank's shards, and said `word`.
std::string ranks_with(uint64_t word, const std::vector<uint64_t>& words, const DeviceMesh& mesh) {
  std::vector<int64_t> ranks;
  for (size_t replica = 0; replica < words.size(); ++replica) {
    const auto place = static_cast<int64_t>(replica) * mesh.size(1) + mesh.coordinate()[1];
    if (words[replica] == word) ranks.push_back(mesh.ranks()[static_cast<size_t>(place)]);
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", ranks);
}

}  // namespace

RankAgreement::RankAgreement(const GroupInfo& info, const std::vector<FSDPParam>& params,
                             const ShardBuffer& shards)
    : info_(info), params_(params), shards_(shards), values_(params.size()) {
  shards_replaced();
}

void RankAgreement::shards_replaced() {
  holders_.clear();
  piece_holders_.clear();
  for (int64_t i = 0; i < shards_.layout().size(); ++i) {
    holders_.push_back(holders_of(shards_.layout().chunk(i), shards_.grid()));
    piece_holders_.push_back(holders_of_pieces(shards_.layout().chunk(i), shards_.grid()));
  }
}

void RankAgreement::shard_written(int64_t index) {
  write_runs_.written(holders_[static_cast<size_t>(index)]);
  piece_runs_.written(piece_holders_[static_cast<size_t>(index)]);
  replica_writes_.written();
}

NoticeWords RankAgreement::word_for_replicas() const {
  return info_.has_pieces() ? words_for_pieces() : NoticeWords{.writing = replica_writes_.word()};
}

NoticeWords RankAgreement::words() const {
  const auto silent = silent_outer_rank_ ? static_cast<uint64_t>(*silent_outer_rank_) + 1 : 0;
  return {.agreement = values_.word(),
          .writing = write_runs_.writing() | silent << kSilentOuterRank};
}

bool RankAgreement::hear_pieces(const std::vector<NoticeWords>& of_outer_ranks) {
  const auto all = writing_in(of_outer_ranks);
  silent_outer_rank_ = WriteRuns::silent_rank(all);
  if (silent_outer_rank_) return false;
  if (!all.empty()) piece_runs_.compared(all);
  return true;
}

void RankAgreement::check(const Gathered& gathered) {
  if (info_.exchanges_on_host()) {
    was_gathered_ |= gathered.from == CameFrom::kAllShards;
    return;
  }
  if (gathered.from == CameFrom::kRead) {
    check_values_read(gathered.tables);
    return values_.agreed();
  }
  check_values(gathered.words);
  values_.agreed();
  if (gathered.from == CameFrom::kAllShards) check_writes(gathered.words);
}

void RankAgreement::check_values_read(const std::vector<std::vector<uint64_t>>& tables) const {
  const bool all_say_the_same =
      std::all_of(tables.begin(), tables.end(), [](const auto& table) { return table.empty(); });
  if (all_say_the_same) return;
  const auto difference = values_.difference_from(tables, names());
  if (!difference.empty()) report_difference(difference);
}

void RankAgreement::check_writes_since_exchange(const std::vector<NoticeWords>& of_shards) {
  if (was_gathered_) check_writes(of_shards);
}

void RankAgreement::exchanged() {
  if (std::exchange(was_gathered_, false)) values_.agreed();
}

void RankAgreement::check_values_along(int64_t mesh_dim) {
  const auto difference = difference_along(mesh_dim);
  if (!difference.empty()) report_difference(difference);
}

void RankAgreement::check_writes_of_pieces(const std::vector<NoticeWords>& of_shards) const {
  for (size_t inner = 0; inner < of_shards.size(); ++inner) {
    const auto silent = static_cast<int64_t>(of_shards[inner].writing >> kSilentOuterRank);
    if (silent > 0) report_silent(static_cast<int64_t>(inner), silent - 1);
  }
}

void RankAgreement::report_silent(int64_t inner_rank, int64_t outer_rank) const {
  const auto& mesh = info_.mesh();
  const auto place = static_cast<size_t>(outer_rank * mesh.size(1) + inner_rank);
  TORCH_CHECK_VALUE(false, "not all ranks wrote the shards of unit '", info_.name(),
                    "' (the first parameter is '", first_name(),
                    "') since they were gathered last: rank ", mesh.ranks()[place],
                    " did not, and others along the outer dimension did", kDecideTogether,
                    info_.rank(), ")");
}

// A rank that took no part in a run of writes has another model than the others.
void RankAgreement::check_writes(const std::vector<NoticeWords>& of_shards) {
  check_writes_of_pieces(of_shards);
  const auto all = writing_in(of_shards);
  if (WriteRuns::all_took_part(all)) {
    if (write_runs_.compared(all)) replica_writes_.run_ended();
    return;
  }
  TORCH_CHECK_VALUE(false, "not all ranks wrote the shards of unit '", info_.name(),
                    "' (the first parameter is '", first_name(),
                    "') since it was gathered last: they have been written ",
                    write_runs_.describe(all, ranks_that_shard(info_.mesh())), kDecideTogether,
                    info_.rank(), ")");
}

void RankAgreement::check_replica_writes(const std::vector<NoticeWords>& of_replicas) {
  if (info_.has_pieces()) {
    if (hear_pieces(of_replicas)) return;
    report_silent(shards_.grid().inner_rank, *silent_outer_rank_);
  }
  std::vector<uint64_t> words;
  for (const auto& each : of_replicas) words.push_back(each.writing);
  if (ReplicaWrites::agree(words)) return replica_writes_.compared(words);
  TORCH_CHECK_VALUE(
      false, "not all replicas wrote the shards of unit '", info_.name(),
      "' (the first parameter is '", first_name(),
      "') since their gradients were added up last: written on ",
      ranks_with(ReplicaWrites::kWrote, words, info_.mesh()), ", not on ",
      ranks_with(ReplicaWrites::kDidNot, words, info_.mesh()),
      ". A rank that skips optimizer.step(), or writes a parameter alone, goes on with another "
      "model than the others: decide together, with an all-reduce of the flag. The gradients of "
      "this backward were dropped, and those of earlier ones that were not in .grad yet, as after "
      "set_is_last_backward(false). Once every rank has written or loaded these shards, training "
      "goes on; every rank gets this error (rank ",
      info_.rank(), ")");
}

// All ranks learn of a difference, whether it is among those that shard or between
// replicas. Where there is nothing to agree on, no rank asks the replicas; nor of copies
// alone, which not all ranks need have noted.
void RankAgreement::check_values(const std::vector<NoticeWords>& of_shards) {
  auto* const replicas = info_.replicas();
  const bool asks = replicas && values_.is_of_all_ranks() && replicas->checks_stamps();
  std::string here;
  if (!all_are(values_.word(), agreements_in(of_shards)))
    here = difference_along(shard_mesh_dim(info_.mesh()));
  const uint64_t word = here.empty() ? values_.word() : AgreedValues::kDiffer;
  const auto of_replicas = asks ? info_.words_of_replicas(word) : std::vector<uint64_t>();
  if (!here.empty()) report_difference(here);
  const auto differ = std::find(of_replicas.begin(), of_replicas.end(), AgreedValues::kDiffer);
  if (differ != of_replicas.end()) report_difference_in(differ - of_replicas.begin());
  if (all_are(word, of_replicas)) return;
  const std::string between = difference_along(*replicate_mesh_dim(info_.mesh()));
  if (!between.empty()) report_difference(between);
}

std::string RankAgreement::difference_along(int64_t mesh_dim) {
  return values_.difference(info_.mesh(), mesh_dim, names());
}

std::vector<std::string> RankAgreement::names() const {
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param.name());
  return names;
}

void RankAgreement::report_difference_in(int64_t replica) const {
  TORCH_CHECK_VALUE(false, "parameters of unit '", info_.name(), "' (the first is '", first_name(),
                    "') differ among the ranks of replica ", replica,
                    ", which name the parameter and what happened; every rank gets an error (rank ",
                    info_.rank(), ")");
}

void RankAgreement::report_difference(const std::string& what) const {
  TORCH_CHECK_VALUE(false, what, "; every rank gets this error (rank ", info_.rank(), ")");
}

}  // namespace fsdp::internal
