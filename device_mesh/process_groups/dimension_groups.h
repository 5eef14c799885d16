// The process group of one mesh dimension, with the further groups over the same ranks
// that were asked for by purpose. Shared by every mesh and slice that contains the
// dimension, so that each group is created once. Thread-safe.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace fsdp::internal {

class DimensionGroups {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  explicit DimensionGroups(Group group);
  ~DimensionGroups();
  DimensionGroups(const DimensionGroups&) = delete;
  DimensionGroups& operator=(const DimensionGroups&) = delete;

  const Group& group() const { return group_; }

  // Tells the ranks, before they meet in the store to make a group, that they do: there,
  // nobody would be told of a rank that does something else. Collective over them.
  void announce(const std::string& what) const;

  // The group over the same ranks for `purpose`. The first call is collective over them;
  // later calls are local.
  Group side_group(const std::string& purpose);

  // A new dimension over some of these ranks (group ranks, this one among them).
  // Collective over those.
  std::shared_ptr<DimensionGroups> make_subset(const std::vector<int64_t>& group_ranks,
                                               const std::string& purpose);

  // What default_mesh() made of this dimension, while a mesh holds it; else null.
  std::shared_ptr<const void> held_mesh();
  void remember_mesh(std::weak_ptr<const void> mesh);

  // `finish` is called by shut_down() first, while every group still works; it replaces
  // what was given under `purpose` before.
  void before_shut_down(const std::string& purpose, std::function<void()> finish);
  // Ends every group made from here, then this one. Local; waits for what is in flight.
  // Afterwards throws what the first of before_shut_down() threw.
  void shut_down();

 private:
  std::exception_ptr finish();

  Group group_;
  std::mutex mutex_;
  std::map<std::string, Group> side_groups_;
  std::vector<std::weak_ptr<DimensionGroups>> subsets_;
  std::map<std::string, std::function<void()>> finishes_;
  std::weak_ptr<const void> mesh_;
};

// The default group (the calling thread's, else the process's) as a dimension; null when
// there is none.
std::shared_ptr<DimensionGroups> default_dimension();

}  // namespace fsdp::internal
