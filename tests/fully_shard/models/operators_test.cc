// Operators of every kind work with parameters that are empty between operators: several
// parameters at once, containers and layouts whose kernels run before autograd's, views
// of views. Every parameter is a unit, emptied and poisoned after every operator.
#include "tests/fully_shard/support/bit_equality.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

namespace F = torch::nn::functional;
using torch::indexing::Slice;

// A 5 x 6 matrix with zeros.
torch::Tensor thinned(Random& random) { return random({5, 6}).relu(); }

Tensors index_parameters(Random& random) {
  return {torch::tensor({2, 0}), torch::tensor({true, false, true}), random({3, 4})};
}

std::vector<Case> several_parameter_cases() {
  return {
      {"one operator of three units", shapes({{4, 4}, {4, 4}, {4, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         const auto &a = w[0], &b = w[1], &c = w[2];
         auto loss = torch::addmm(a, b, c).pow(2).sum() + torch::cat({a, b, c}).pow(2).sum() +
                     torch::where(a > 0, b, c).sum() +
                     torch::einsum("ij,jk,kl->il", {a, b, c}).sum() +
                     torch::linalg_multi_dot({a, b, c}).sum() + torch::lerp(a, b, c).sum() +
                     torch::addcmul(a, b, c).sum() + torch::stack({a, b, c}).exp().sum() +
                     torch::block_diag({a, b}).pow(2).sum() +
                     torch::cartesian_prod({a.view(-1), b.view(-1)}).pow(2).sum();
         loss.backward();
         return {loss};
       }},
      {"attention with parameters as query key value and mask",
       shapes({{2, 2, 5, 8}, {2, 2, 5, 8}, {2, 2, 5, 8}, {5, 5}}),
       [](const Tensors& w, Random&) -> Tensors {
         const auto &q = w[0], &k = w[1], &v = w[2], &mask = w[3];
         auto loss =
             torch::scaled_dot_product_attention(q, k, v).pow(2).sum() +
             torch::scaled_dot_product_attention(q, k, v, {}, 0., /*is_causal=*/true).pow(2).sum() +
             torch::scaled_dot_product_attention(q, k, v, mask).pow(2).sum() +
             torch::scaled_dot_product_attention(q, k, v, mask.detach() > 0).nan_to_num().sum();
         loss.backward();
         torch::NoGradGuard no_grad;
         return {loss, torch::scaled_dot_product_attention(q, k, v, mask),
                 torch::scaled_dot_product_attention(q.to(torch::kBFloat16), k.to(torch::kBFloat16),
                                                     v.to(torch::kBFloat16))};
       }},
      {"index by parameters", index_parameters,
       [](const Tensors& w, Random& random) -> Tensors {
         auto x = random({3, 4});
         Tensors results{x.index({w[0]}), x.index({w[1]}), x.index({Slice(), w[0]}),
                         at::_unsafe_index(x, {w[0]})};
         auto loss = w[2].index({w[0]}).pow(2).sum();
         loss.backward();
         torch::NoGradGuard no_grad;
         x.index_put_({w[0]}, random({2, 4}));
         w[2].index_put_({w[0]}, torch::ones({2, 4}), /*accumulate=*/true);
         results.insert(results.end(), {loss, x});
         return results;
       }},
      {"foreach operators", shapes({{4, 4}, {3}}),
       [](const Tensors& w, Random& random) -> Tensors {
         torch::NoGradGuard no_grad;
         const Tensors other{random({4, 4}), random({3})};
         at::_foreach_add_(w, other, 0.5);
         at::_foreach_mul_(w, 2);
         at::_foreach_lerp_(w, other, 0.3);
         at::_foreach_addcmul_(w, other, w);
         auto results = at::_foreach_norm(w, 2);
         at::_foreach_copy_(other, w);
         at::_foreach_sqrt_({w[0]});
         results.insert(results.end(), other.begin(), other.end());
         return results;
       }},
  };
}

std::vector<Case> layout_cases() {
  return {
      {"sparse coo times parameter", shapes({{6, 4}, {5, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto adjacency = thinned(random).to_sparse();
         auto loss = torch::mm(adjacency, w[0]).pow(2).sum() +
                     torch::_sparse_mm(adjacency, w[0]).pow(3).sum();
         loss.backward();
         return {loss, torch::addmm(w[1], adjacency, w[0])};
       }},
      {"sparse csr times parameter", shapes({{6, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         auto loss = thinned(random).to_sparse_csr().matmul(w[0]).pow(2).sum();
         loss.backward();
         return {loss};
       }},
      {"sparse and dense elementwise", shapes({{5, 6}}),
       [](const Tensors& w, Random& random) -> Tensors {
         torch::NoGradGuard no_grad;
         const auto x = thinned(random).to_sparse().coalesce();
         return {w[0].sparse_mask(x).to_dense(), torch::mul(x, w[0]).to_dense(),
                 w[0].to_sparse().to_dense(), w[0].to_sparse_csr().to_dense(), torch::add(w[0], x)};
       }},
      {"a sparse update of a parameter", shapes({{10, 4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         torch::NoGradGuard no_grad;
         const auto rows = torch::tensor({1, 3}).view({1, 2});
         w[0].add_(torch::sparse_coo_tensor(rows, random({2, 4}), {10, 4}), -0.1);
         return {w[0]};
       }},
      {"mkldnn linear and convolution", shapes({{8, 8}, {8}, {8, 8, 3, 3}}),
       [](const Tensors& w, Random& random) -> Tensors {
         torch::NoGradGuard no_grad;
         const auto x = random({4, 8}).to_mkldnn(), image = random({1, 8, 8, 8}).to_mkldnn();
         return {w[0].to_mkldnn().to_dense(),
                 torch::mkldnn_linear(x, w[0].to_mkldnn(), w[1]).to_dense(),
                 torch::mkldnn_linear(x, w[0], w[1]).to_dense(),
                 torch::conv2d(image, w[2], w[1]).to_dense()};
       }},
      {"nested tensors", shapes({{2, 4}, {3, 4}, {5, 4}, {5}, {12}}),
       [](const Tensors& w, Random& random) -> Tensors {
         torch::NoGradGuard no_grad;
         const auto nested = at::_nested_tensor_from_tensor_list({random({2, 4}), random({3, 4})});
         const auto of_parameters =
             at::_nested_tensor_from_tensor_list({w[0].detach(), w[1].detach()});
         const auto view = at::_nested_view_from_buffer(
             w[4], torch::tensor({2, 2, 4, 2}).view({2, 2}),
             torch::tensor({2, 1, 2, 1}).view({2, 2}), torch::tensor({0, 4}));
         return {torch::linear(nested, w[2], w[3]).to_padded_tensor(0),
                 of_parameters.to_padded_tensor(0), view.to_padded_tensor(0), view.unbind()[1] * 2};
       }},
      {"quantisation", shapes({{8, 8}, {8}}),
       [](const Tensors& w, Random&) -> Tensors {
         auto loss = torch::fake_quantize_per_tensor_affine(w[0], 0.1, 0, -128, 127).pow(2).sum();
         loss.backward();
         torch::NoGradGuard no_grad;
         return {loss, torch::quantize_per_tensor(w[0], 0.1, 0, torch::kQInt8).dequantize(),
                 std::get<0>(torch::choose_qparams_optimized(w[0], 64, 200, 0.16, 8)),
                 torch::quantize_per_channel(w[0], w[1].abs() + 0.1,
                                             torch::zeros({8}, torch::kLong), 0, torch::kQInt8)
                     .dequantize(),
                 std::get<0>(torch::fbgemm_linear_quantize_weight(w[0]))};
       }},
      {"sections given by a parameter",
       [](Random&) {
         return Tensors{torch::tensor({1, 2})};
       },
       [](const Tensors& w, Random& random) -> Tensors { return random({5}).tensor_split(w[0]); }},
  };
}

std::vector<Case> view_cases() {
  return {
      {"deep views", shapes({{6, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         const auto& p = w[0];
         const Tensors views{p.as_strided({2, 2}, {4, 1}, 5),
                             p.unfold(0, 2, 2),
                             p.unsqueeze(0).expand({3, 6, 4}),
                             p.split(2)[1],
                             p.chunk(3)[2],
                             p.unbind()[3],
                             p.diagonal(),
                             p.permute({1, 0}).flatten(),
                             p.swapaxes(0, 1).squeeze(),
                             p.movedim(0, 1),
                             p.unflatten(0, {2, 3}),
                             p.split_with_sizes({2, 4})[1],
                             p.hsplit(2)[1],
                             p.reshape({4, 6}),
                             p.alias(),
                             torch::atleast_3d(p),
                             torch::broadcast_tensors({p, torch::ones({2, 6, 4})})[0],
                             torch::_reshape_alias(p, {3, 8}, {8, 1}),
                             torch::_unsafe_view(p, {24})};
         auto loss = torch::zeros({});
         for (const auto& view : views) loss = loss + view.pow(2).sum();
         loss.backward();
         return {loss, p.detach().view(torch::kInt) + 0};
       }},
      {"handles of one parameter", shapes({{3, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         const auto& p = w[0];
         Tensors handles{
             p.data(),  p.detach(),           p.variable_data(), p.tensor_data(),     p.alias(),
             p.clone(), p.to(torch::kDouble), p.contiguous(),    p.to(torch::kFloat), p.view_as(p)};
         Tensors results;
         for (const auto& handle : handles) results.push_back(handle + 1);
         EXPECT_EQ(p[1][2].item<float>(), results[0][1][2].item<float>() - 1);
         EXPECT_TRUE(torch::equal(p, handles[5]));
         EXPECT_TRUE(p.is_set_to(p.detach()));
         EXPECT_TRUE(p.is_alias_of(p.view(-1)));
         results.insert(results.end(), handles.begin(), handles.end());
         return results;
       }},
      {"new tensors of a parameter's kind", shapes({{4, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         torch::NoGradGuard no_grad;
         EXPECT_EQ(w[0].to(torch::kMeta).numel(), 16);
         return {torch::empty_like(w[0]).zero_(), w[0].new_zeros({2}), torch::ones_like(w[0]),
                 w[0].cpu(), w[0].to(torch::kCPU, torch::kHalf)};
       }},
      {"complex parameters",
       [](Random& random) {
         return Tensors{random({4, 4}, torch::kComplexFloat)};
       },
       [](const Tensors& w, Random& random) -> Tensors {
         const auto& p = w[0];
         auto loss =
             torch::view_as_real(random({3, 4}, torch::kComplexFloat).mm(p.conj())).pow(2).sum() +
             torch::abs(p.mH().matmul(p)).sum() + torch::imag(p).sum() +
             torch::real(p).pow(2).sum() + torch::imag(p.conj()).pow(2).sum();
         loss.backward();
         torch::NoGradGuard no_grad;
         const auto round_trip =
             torch::view_as_complex(torch::view_as_real(p)).conj().resolve_conj() + 1;
         torch::imag(p.conj()).mul_(2);
         return {loss, round_trip, torch::imag(p.conj()).resolve_neg()};
       }},
      {"parameters without elements", shapes({{0, 4}, {0}, {4}}),
       [](const Tensors& w, Random& random) -> Tensors {
         auto loss =
             torch::linear(random({3, 4}), w[0], w[1]).sum() + w[0].sum() + w[2].pow(2).sum();
         loss.backward();
         return {loss, w[0].data()};
       }},
      {"printing", shapes({{3, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         std::ostringstream printed, copy;
         printed << w[0].detach();
         copy << w[0].detach().clone();
         EXPECT_EQ(printed.str(), copy.str());
         return {};
       }},
  };
}

std::vector<Case> library_cases() {
  return {
      {"functional layers", shapes({{8, 6}, {8}, {8}, {4, 3, 3, 3}, {4}, {5, 6, 6}, {1}, {10, 6}}),
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({4, 6}), image = random({2, 3, 8, 8});
         const auto y = F::linear(x, w[0], w[1]);
         auto loss =
             F::layer_norm(y, F::LayerNormFuncOptions({8}).weight(w[2]).bias(w[1])).pow(3).sum() +
             F::conv2d(image, w[3], F::Conv2dFuncOptions().bias(w[4])).pow(2).sum() +
             F::conv_transpose2d(random({2, 4, 4, 4}), w[3]).pow(2).sum() +
             F::bilinear(x, x, w[5]).pow(2).sum() + F::prelu(x, w[6]).sum() +
             F::embedding(random.indices(10, {4}), w[7]).pow(2).sum() +
             F::group_norm(y, F::GroupNormFuncOptions(2).weight(w[2]).bias(w[1])).pow(3).sum() +
             F::normalize(w[0]).sum() + F::cosine_similarity(w[0], w[0].flip(0)).sum() +
             F::cross_entropy(y, random.indices(8, {4}),
                              F::CrossEntropyFuncOptions().weight(w[2].detach().abs())) +
             F::softmax(w[0], 1).pow(2).sum() +
             F::pad(w[0], F::PadFuncOptions({1, 1})).pow(2).sum() +
             F::max_pool2d(w[3], F::MaxPool2dFuncOptions(2)).sum() +
             torch::cdist(w[0], w[0]).sum() +
             F::unfold(w[3], F::UnfoldFuncOptions({2, 2})).pow(2).sum();
         loss.backward();
         return {loss};
       }},
      {"linear algebra and fourier transforms", shapes({{4, 4}, {4, 4}}),
       [](const Tensors& w, Random&) -> Tensors {
         const auto &p = w[0], &q = w[1];
         const auto definite = p.matmul(p.t()) + torch::eye(4);
         auto loss = torch::linalg_solve(p, q).sum() + std::get<1>(torch::linalg_svd(p)).sum() +
                     torch::linalg_cholesky(definite).sum() + torch::linalg_inv(p).sum() +
                     torch::linalg_det(p) + std::get<1>(torch::linalg_slogdet(p)) +
                     std::get<1>(torch::linalg_qr(p)).sum() + torch::matrix_exp(p).sum() +
                     torch::fft_fft(p).abs().sum() +
                     torch::fft_irfft(torch::fft_rfft(p)).pow(2).sum() +
                     std::get<0>(torch::linalg_eigh(definite)).sum() + torch::linalg_norm(p) +
                     torch::linalg_matrix_power(p, 3).sum() + torch::trace(p) +
                     std::get<0>(torch::sort(p)).pow(2).sum() + std::get<0>(p.topk(2)).sum() +
                     p.cumsum(0).pow(2).sum() + torch::logsumexp(p, 1).sum() +
                     torch::stft(p.view(-1), 8, 4, {}, torch::hann_window(8), false, true, true)
                         .abs()
                         .sum();
         loss.backward();
         return {loss};
       }},
      {"bfloat16 and channels-last inputs",
       [](Random& random) {
         return Tensors{random({32, 32}).to(torch::kBFloat16), random({32}).to(torch::kBFloat16),
                        random({16, 16, 3, 3}).to(torch::kBFloat16), random({16, 16, 3, 3})};
       },
       [](const Tensors& w, Random& random) -> Tensors {
         const auto x = random({8, 32}).to(torch::kBFloat16).requires_grad_();
         auto loss = torch::linear(x, w[0], w[1]).pow(2).sum().to(torch::kFloat) +
                     torch::conv2d(random({2, 16, 8, 8}).to(torch::kBFloat16), w[2])
                         .pow(2)
                         .sum()
                         .to(torch::kFloat) +
                     torch::conv2d(
                         random({2, 16, 8, 8}).contiguous(torch::MemoryFormat::ChannelsLast), w[3])
                         .pow(2)
                         .sum();
         loss.backward();
         return {loss, x.grad()};
       }},
      {"embedding with renormalisation and weighted bags", shapes({{10, 4}, {10, 4}, {6}}),
       [](const Tensors& w, Random& random) -> Tensors {
         auto loss =
             F::embedding(torch::tensor({1, 2, 1}), w[0], F::EmbeddingFuncOptions().max_norm(0.5))
                 .pow(2)
                 .sum() +
             std::get<0>(torch::embedding_bag(w[1], random.indices(10, {6}), torch::tensor({0, 3}),
                                              false, 0, false, w[2]))
                 .pow(2)
                 .sum();
         loss.backward();
         return {loss};
       }},
  };
}

class InterceptionOperators : public ::testing::TestWithParam<Case> {};

TEST_P(InterceptionOperators, HaveTheUnshardedBits) {
  for (const int64_t world : {1, 2, 3}) expect_bit_equal(GetParam(), world);
}

const auto name_of_case = [](const ::testing::TestParamInfo<Case>& info) {
  return test_name(info.param.name);
};

INSTANTIATE_TEST_SUITE_P(SeveralParameters, InterceptionOperators,
                         ::testing::ValuesIn(several_parameter_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Layouts, InterceptionOperators, ::testing::ValuesIn(layout_cases()),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Views, InterceptionOperators, ::testing::ValuesIn(view_cases()),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Library, InterceptionOperators, ::testing::ValuesIn(library_cases()),
                         name_of_case);

}  // namespace
}  // namespace fsdp::testing
