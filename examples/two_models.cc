// Two models with an optimizer each, both sharded over the same ranks: a GAN, whose
// generator learns to draw points like given ones, and whose discriminator learns to tell
// them apart.
//
//   ./two_models                                           # one process
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost ./two_models & done; wait
//   torchrun --nproc-per-node 4 --no-python ./two_models   # or another launcher
//
// The last line tells how far the mean of what is generated is from that of the given
// points, and is nearly the same on 1, 2, 3 and 4 ranks.
#include "fully_shard/fully_shard.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>

// Linear layers with LeakyReLU between them.
torch::nn::Sequential make_model(int64_t inputs, int64_t width, int64_t outputs) {
  const auto leaky = torch::nn::LeakyReLUOptions().negative_slope(0.2);
  return torch::nn::Sequential(torch::nn::Linear(inputs, width), torch::nn::LeakyReLU(leaky),
                               torch::nn::Linear(width, width), torch::nn::LeakyReLU(leaky),
                               torch::nn::Linear(width, outputs));
}

torch::Tensor loss_of(const torch::Tensor& logits, double label) {
  return torch::nn::functional::binary_cross_entropy_with_logits(logits,
                                                                 torch::full_like(logits, label));
}

int main() {
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::launch_environment().world_size});

  torch::manual_seed(1);  // every rank starts with the same weights
  auto generator = make_model(/*inputs=*/8, /*width=*/64, /*outputs=*/2);
  auto discriminator = make_model(/*inputs=*/2, /*width=*/64, /*outputs=*/1);
  fsdp::fully_shard(generator, mesh);
  fsdp::fully_shard(discriminator, mesh);
  // The discriminator learns faster, which keeps the two from running in circles.
  const auto with_lr = [](double lr) { return torch::optim::AdamOptions(lr).betas({0, 0.999}); };
  torch::optim::Adam generator_optimizer(generator->parameters(), with_lr(1e-3));
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(), with_lr(4e-3));

  // Drawn alike on all ranks; of it the part of this rank.
  const auto draw = [&](int64_t columns) {
    return torch::randn({96, columns}).chunk(mesh.size())[mesh.rank()];
  };
  const auto mean = torch::tensor({2.0, -1.0});
  double first = 0, last = 0;
  for (int step = 1; step <= 200; ++step) {
    const auto real = draw(2) * 0.5 + mean;
    const auto fake = generator->forward(draw(8));

    discriminator_optimizer.zero_grad();  // of what the generator's backward left, too
    auto loss = loss_of(discriminator->forward(real), 1) +
                loss_of(discriminator->forward(fake.detach()), 0);
    loss.backward();
    discriminator_optimizer.step();

    generator_optimizer.zero_grad();
    loss_of(discriminator->forward(fake), 1).backward();
    generator_optimizer.step();

    const auto mean_of_all = fsdp::all_reduce(fake.detach().mean(0), mesh, fsdp::Reduce::kMean);
    last = (mean_of_all - mean).norm().item<double>();
    if (step == 1) first = last;
    if (step % 25 == 0 && fsdp::is_rank_zero()) std::printf("step %d: distance %.2f\n", step, last);
  }
  if (fsdp::is_rank_zero()) std::printf("distance %.2f -> %.2f\n", first, last);
  fsdp::destroy_process_group();
}
