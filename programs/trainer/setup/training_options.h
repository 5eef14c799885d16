// What a training run is asked for.
#pragma once

#include "fully_shard/policies.h"
#include "programs/trainer/data/batches.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/setup/checkpointing.h"
#include "programs/trainer/setup/learning_rate.h"

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>
#include <string>

namespace programs {

enum class OptimizerKind { kAdamW, kSgd };
// What becomes a unit beside the root: the embedding, every block and the head; every
// layer with parameters; nothing.
enum class Units { kBlocks, kLayers, kRoot };

struct TrainingOptions {
  std::string data;  // file or folder (tokens.h)
  Packing packing = Packing::kJoined;
  std::optional<int64_t> end_of_document;  // token that ends documents, in files of tokens
  TransformerConfig model;
  LoraOptions lora;
  std::string init_from;  // a folder (hugging_face.h) with this model; empty: from the seed
  std::string export_to;  // such a folder, or one of adapters, to be made at the end; empty: none
  int64_t replicas = 1;   // groups of ranks that hold the same shards
  int64_t tp = 1;         // ranks that compute one model together (transformer_plan.h)
  bool sequence_parallel = false;
  int64_t ep = 1;  // ranks that have the experts of a block together
  int64_t cp = 1;  // ranks that share a batch, which is cut along the tokens
  Units units = Units::kBlocks;
  fsdp::FullyShardOptions sharding;     // of every unit
  bool deferred_init = false;           // no rank ever has the whole model
  bool checkpoint_activations = false;  // compute blocks again in backward
  int64_t batch = 8;                    // sequences per rank and backward
  int64_t accumulate = 1;               // backwards per step
  int64_t tokens = 128;                 // per sequence
  int64_t steps = 300;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double lr = 2e-3;
  int64_t warmup = 0;  // steps
  Decay decay = Decay::kNone;
  double weight_decay = 0.01;  // of matrices, by AdamW
  double clip = 0;             // largest norm of the gradients; 0: any
  uint64_t seed = 1;
  int64_t validate_every = 100;  // steps; 0: at the start and the end only
  bool compare = false;          // train the unsharded model alongside
  std::string prompt = "#include <";
  int64_t generate = 200;  // tokens
  double temperature = 0.7;
  c10::DeviceType device = c10::DeviceType::CPU;
  CheckpointOptions checkpoints;
  std::string metrics;  // file (metrics_file.h); empty: none
  std::string profile;  // file for a trace of rank 0's steps 2 to 4; empty: none
  std::string report;   // file for the page of the run (run_page.h); empty: none
};

}  // namespace programs
