#include "checkpoint/internal/save_plan.h"

#include "checkpoint/internal/dtype.h"
#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// Smaller copies all go to the first rank: readers open its file anyway.
constexpr int64_t kSmallBytes = 64 * 1024;

size_t index_of(std::vector<SavedLayout>& layouts, const SavedLayout& layout) {
  const auto found = std::find(layouts.begin(), layouts.end(), layout);
  if (found != layouts.end()) return static_cast<size_t>(found - layouts.begin());
  layouts.push_back(layout);
  return layouts.size() - 1;
}

bool is_copied(const SavedLayout& layout) {
  return std::all_of(layout.shard_dims.begin(), layout.shard_dims.end(),
                     [](int64_t dim) { return dim == kNotSharded; });
}

class Planner {
 public:
  Planner(int64_t rank, int64_t world_size, bool balanced)
      : rank_(rank), world_size_(world_size), balanced_(balanced) {}

  void add(const SaveItem& item) {
    ItemRecord record{.kind = item.kind, .tensors = {}, .ties = item.ties, .details = item.details};
    std::vector<size_t> order(item.tensors.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return item.tensors[a].tensor.nbytes() > item.tensors[b].tensor.nbytes();
    });
    for (const size_t i : order) record.tensors[item.tensors[i].name] = place(item.tensors[i]);
    for (const NamedTensor& each : item.tensors) {  // in the order of the model
      add_my_part(item.name, each, record.tensors.at(each.name));
    }
    plan_.manifest.items.emplace(item.name, std::move(record));
  }

  SavePlan take() {
    plan_.manifest.world_size = world_size_;
    return std::move(plan_);
  }

 private:
  TensorRecord place(const NamedTensor& named) {
    const at::Tensor& tensor = named.tensor;
    TORCH_CHECK_VALUE(dtype_name(tensor.scalar_type()), "save: '", named.name, "' is ",
                      tensor.scalar_type(), ", which safetensors files cannot hold");
    const SavedLayout layout = layout_of(tensor, world_size_, named.name);
    TensorRecord record{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
    record.layout = static_cast<int64_t>(index_of(plan_.manifest.layouts, layout));
    if (balanced_ && is_dtensor(tensor)) record.replica = least_loaded(layout, record);
    for (const auto& box : written_boxes(layout, record.shape, record.replica)) {
      load_[box.rank] += numel_of(box.box) * tensor.element_size();
    }
    return record;
  }

  int64_t least_loaded(const SavedLayout& layout, const TensorRecord& record) {
    const int64_t bytes =
        numel_of(whole_box(record.shape)) * static_cast<int64_t>(c10::elementSize(record.dtype));
    if (is_copied(layout) && bytes < kSmallBytes) return 0;
    std::pair<int64_t, int64_t> best{INT64_MAX, 0};
    for (int64_t replica = 0; replica < replica_count(layout); ++replica) {
      int64_t load = 0;
      for (const auto& box : written_boxes(layout, record.shape, replica)) load += load_[box.rank];
      best = std::min(best, {load, replica});
    }
    return best.second;
  }

  void add_my_part(const std::string& item, const NamedTensor& named, const TensorRecord& record) {
    const auto& layout = plan_.manifest.layouts[static_cast<size_t>(record.layout)];
    for (auto& written : written_boxes(layout, record.shape, record.replica)) {
      if (written.rank != rank_) continue;
      Entry entry{.name = named.name, .tensor = named.name, .dtype = record.dtype};
      entry.box = std::move(written.box);
      entry.global_shape = record.shape;
      const bool sharded = is_dtensor(named.tensor);
      plan_.mine[item].push_back(
          {std::move(entry), sharded ? local_of(named.tensor) : named.tensor});
    }
  }

  const int64_t rank_, world_size_;
  const bool balanced_;
  SavePlan plan_;
  std::map<int64_t, int64_t> load_;  // bytes by rank
};

bool same_place(const TensorRecord& a, const SavedLayout& a_layout, const TensorRecord& b,
                const SavedLayout& b_layout) {
  return a.dtype == b.dtype && a.shape == b.shape && a.replica == b.replica && a_layout == b_layout;
}

// Adds what `rank` knows of item `name`.
void merge_item(Manifest& merged, const Manifest& plan, const std::string& name,
                const ItemRecord& item, size_t rank) {
  const ItemRecord empty{.kind = item.kind, .tensors = {}, .ties = {}, .details = item.details};
  ItemRecord& target = merged.items.try_emplace(name, empty).first->second;
  target.ties.insert(item.ties.begin(), item.ties.end());
  for (const auto& [tensor, theirs] : item.tensors) {
    const SavedLayout& layout = plan.layouts[static_cast<size_t>(theirs.layout)];
    TensorRecord record = theirs;
    record.layout = static_cast<int64_t>(index_of(merged.layouts, layout));
    const auto [known, is_new] = target.tensors.emplace(tensor, record);
    const auto& known_layout = merged.layouts[static_cast<size_t>(known->second.layout)];
    TORCH_CHECK_VALUE(is_new || same_place(known->second, known_layout, record, layout), "'",
                      tensor, "' of '", name, "' has another shape, dtype, mesh or ",
                      "placement on rank ", rank, " than on an earlier rank");
  }
}

}  // namespace

SavePlan plan_save(const std::vector<SaveItem>& items, int64_t rank, int64_t world_size,
                   bool balanced) {
  Planner planner(rank, world_size, balanced);
  for (const SaveItem& item : items) planner.add(item);
  return planner.take();
}

Manifest merge_plans(const std::vector<Manifest>& plans) {
  Manifest merged = plans.front();
  for (size_t rank = 1; rank < plans.size(); ++rank) {
    for (const auto& [name, item] : plans[rank].items) {
      merge_item(merged, plans[rank], name, item, rank);
    }
  }
  return merged;
}

}  // namespace fsdp::internal::checkpoint
