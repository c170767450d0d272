"""The arguments of functions of other packages that the harness calls, read off their published sources.

vLLM 0.33.0, SGLang 0.5.23, FlashInfer 0.7.2 and TransformerEngine 2.20.2 from their wheels. An argument with a default
ends in ``=``; ``*`` begins those that are given by name alone.
"""

from __future__ import annotations

import inspect

ARGUMENTS: dict[
    tuple[str, str], tuple[str, str]
] = {  # module as opcast imports it, name -> file of the source, arguments
    ("vllm._custom_ops", "rms_norm"): (
        "vllm/_custom_ops.py",
        "out input weight epsilon",
    ),
    ("vllm._custom_ops", "rotary_embedding"): (
        "vllm/_custom_ops.py",
        "positions query key head_size cos_sin_cache is_neox rope_dim_offset= inverse=",
    ),
    ("vllm._custom_ops", "scaled_fp8_quant"): (
        "vllm/_custom_ops.py",
        "input scale= num_token_padding= scale_ub= use_per_token_if_dynamic= output= group_shape=",
    ),
    ("vllm._custom_ops", "scaled_fp4_quant"): (
        "vllm/_custom_ops.py",
        "input input_global_scale is_sf_swizzled_layout= backend= padded_n=",
    ),
    ("vllm._custom_ops", "cutlass_scaled_mm"): (
        "vllm/_custom_ops.py",
        "a b scale_a scale_b out_dtype bias=",
    ),
    ("vllm._custom_ops", "marlin_gemm"): (
        "vllm/_custom_ops.py",
        "a c b_q_weight b_bias b_scales a_scales global_scale b_zeros workspace b_q_type size_m size_n "
        "size_k use_atomic_add= use_fp32_reduce= is_zp_float=",
    ),
    ("vllm._custom_ops", "machete_mm"): (
        "vllm/_custom_ops.py",
        "a b_q b_type out_type= b_group_scales= b_group_zeros= b_group_size= b_channel_scales= "
        "a_token_scales= schedule=",
    ),
    ("vllm._custom_ops", "machete_prepack_B"): (
        "vllm/_custom_ops.py",
        "b_q_weight a_type b_type group_scales_type",
    ),
    ("vllm.vllm_flash_attn", "flash_attn_varlen_func"): (
        "vllm/vllm_flash_attn/flash_attn_interface.py",
        "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k= seqused_k= q_v= dropout_p= "
        "softmax_scale= causal= window_size= softcap= alibi_slopes= deterministic= return_attn_probs= "
        "block_table= return_softmax_lse= out= scheduler_metadata= q_descale= k_descale= v_descale= "
        "num_splits= output_scale= fa_version= s_aux= cp_world_size= cp_rank= cp_tot_seqused_k= "
        "mask_mod= block_sparse_tensors= aux_tensors= aux_tensor_leading_dims= dynamic_causal= "
        "gather_kv_indices= gather_kv_valid_length=",
    ),
    ("vllm.vllm_flash_attn", "get_scheduler_metadata"): (
        "vllm/vllm_flash_attn/flash_attn_interface.py",
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype= "
        "headdim_v= cu_seqlens_q= cu_seqlens_k_new= cache_leftpad= page_size= max_seqlen_k_new= causal= "
        "window_size= has_softcap= num_splits= pack_gqa= sm_margin=",
    ),
    ("vllm.model_executor.layers.fused_moe", "fused_topk"): (
        "vllm/model_executor/layers/fused_moe/router/fused_topk_router.py",
        "hidden_states gating_output topk renormalize indices_type= scoring_func=",
    ),
    ("vllm.model_executor.layers.fused_moe", "fused_experts"): (
        "vllm/model_executor/layers/fused_moe/fused_moe.py",
        "hidden_states w1 w2 topk_weights topk_ids activation= apply_router_weight_on_input= "
        "global_num_experts= expert_map= quant_config=",
    ),
    ("vllm.model_executor.layers.fused_moe.config", "fp8_w8a8_moe_quant_config"): (
        "vllm/model_executor/layers/fused_moe/config.py",
        "w1_scale w2_scale a1_scale= a2_scale= w1_bias= w2_bias= per_act_token_quant= per_out_ch_quant= "
        "block_shape= a1_gscale= a2_gscale= g1_alphas= g2_alphas= is_scale_transposed= gemm1_alpha= "
        "gemm1_beta= gemm1_clamp_limit=",
    ),
    ("vllm.model_executor.layers.fused_moe.experts.marlin_moe", "fused_marlin_moe"): (
        "vllm/model_executor/layers/fused_moe/experts/marlin_moe.py",
        "hidden_states w1 w2 bias1 bias2 w1_scale w2_scale topk_weights topk_ids quant_type_id "
        "apply_router_weight_on_input= global_num_experts= activation= activation_func= moe_sum= "
        "expert_map= input_global_scale1= input_global_scale2= global_scale1= global_scale2= w1_zeros= "
        "w2_zeros= workspace= intermediate_cache13= intermediate_cache2= output= input_dtype= "
        "activation_config= mul_topk_weights_in_gemm2=",
    ),
    ("vllm.model_executor.layers.quantization.utils.marlin_utils", "marlin_make_workspace_new"): (
        "vllm/model_executor/layers/quantization/utils/marlin_utils.py",
        "device max_blocks_per_sm=",
    ),
    ("vllm.model_executor.layers.quantization.utils.fp8_utils", "per_token_group_quant_fp8"): (
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "x group_size eps= dtype= column_major_scales= tma_aligned_scales= out_q= use_ue8m0=",
    ),
    ("vllm.model_executor.layers.quantization.utils.fp8_utils", "per_token_group_quant_fp8_packed_for_deepgemm"): (
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "x group_size eps= use_ue8m0= out_q=",
    ),
    ("vllm.model_executor.layers.quantization.utils.fp8_utils", "w8a8_triton_block_scaled_mm"): (
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "A B As Bs block_size output_dtype=",
    ),
    ("sglang.kernels.ops.gemm.fp8_kernel", "w8a8_block_fp8_matmul_triton"): (
        "sglang/kernels/ops/gemm/fp8_kernel.py",
        "A B As Bs block_size output_dtype=",
    ),
    ("vllm.model_executor.layers.quantization.utils.fp8_utils", "deepgemm_post_process_weight_scale_block"): (
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "ws mn k quant_block_shape num_groups is_sfa=",
    ),
    ("vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe", "DeepGemmExperts.__init__"): (
        "vllm/model_executor/layers/fused_moe/experts/deep_gemm_moe.py",
        "moe_config quant_config",
    ),
    ("vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe", "DeepGemmExperts.workspace_shapes"): (
        "vllm/model_executor/layers/fused_moe/experts/deep_gemm_moe.py",
        "M N K topk global_num_experts local_num_experts expert_tokens_meta activation",
    ),
    ("vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe", "DeepGemmExperts.apply"): (
        "vllm/model_executor/layers/fused_moe/experts/deep_gemm_moe.py",
        "output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale "
        "a2_scale workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input",
    ),
    ("vllm.v1.attention.ops.flashmla", "flash_mla_with_kvcache"): (
        "vllm/third_party/flashmla/flash_mla_interface.py",
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits= "
        "softmax_scale= causal= is_fp8_kvcache= indices= attn_sink= extra_k_cache= "
        "extra_indices_in_kvcache= topk_length= extra_topk_length= out= enable_batch_invariant=",
    ),
    ("vllm.v1.attention.ops.flashmla", "get_mla_metadata_dense_fp8"): (
        "vllm/v1/attention/ops/flashmla.py",
        "cache_seqlens num_q_tokens_per_head_k num_heads_k",
    ),
    ("vllm.v1.attention.ops.flashmla", "flash_mla_with_kvcache_fp8"): (
        "vllm/v1/attention/ops/flashmla.py",
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
        "softmax_scale= causal= descale_q= descale_k=",
    ),
    ("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe", "fused_experts"): (
        "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe.py",
        "hidden_states w1 w2 topk_output moe_runner_config b1= b2= use_fp8_w8a8= use_int8_w8a8= "
        "use_int8_w8a16= use_int4_w4a16= per_channel_quant= w1_scale= w2_scale= w1_zp= w2_zp= a1_scale= "
        "a2_scale= block_shape= a1_q= fuse_swiglu_interleaved=",
    ),
    ("flashinfer.comm", "create_allreduce_fusion_workspace"): (
        "flashinfer/comm/allreduce.py",
        "backend= world_size= rank= max_token_num= hidden_dim= dtype= gpus_per_node= comm_backend= "
        "force_oneshot_support= group= * top_k= rms_eps= weight_bias= routed_scaling_factor= "
        "include_shared_expert= add_residual= write_residual_output= apply_rms_norm= output_dtype= dynamic_fp8= "
        "write_norm_output= config=",
    ),
    ("flashinfer.comm", "allreduce_fusion"): (
        "flashinfer/comm/allreduce.py",
        "input workspace pattern launch_with_pdl= trigger_completion_at_end= output= residual_out= norm_out= "
        "quant_out= scale_out= residual_in= rms_gamma= rms_eps= scale_factor= layout_code= use_oneshot= fp32_acc= "
        "moe_reduction_device_num_experts= moe_reduction_scale_input= moe_reduction_active_experts_token_input= "
        "moe_reduction_token_input= expanded_idx_to_permuted_idx= expert_scale_factor= shared_expert_output= "
        "block_quant_group_size= weight_bias= * moe_finalize_backend=",
    ),
    ("flashinfer.comm.mnnvl", "is_multicast_supported"): ("flashinfer/comm/mnnvl.py", "device_idx"),
    ("flashinfer.fused_moe", "cutlass_fused_moe"): (
        "flashinfer/fused_moe/core.py",
        "input token_selected_experts token_final_scales fc1_expert_weights fc2_expert_weights "
        "output_dtype quant_scales fc1_expert_biases= fc2_expert_biases= input_sf= swiglu_alpha= "
        "swiglu_beta= swiglu_limit= tp_size= tp_rank= ep_size= ep_rank= cluster_size= cluster_rank= "
        "output= enable_alltoall= use_deepseek_fp8_block_scale= use_w4_group_scaling= "
        "use_mxfp8_act_scaling= min_latency_mode= use_packed_weights= use_wfp4afp8_humming= "
        "tune_max_num_tokens= enable_pdl= activation_type= swizzled_input_sf= use_fused_finalize= "
        "profile_ids= workspace_buffer= * clamped_relu2_limit= situ_beta= situ_linear_beta= backend=",
    ),
    ("flashinfer.fused_moe", "trtllm_fp8_block_scale_routed_moe"): (
        "flashinfer/fused_moe/core.py",
        "topk_ids routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale "
        "gemm2_weights gemm2_weights_scale num_experts top_k n_group topk_group intermediate_size "
        "local_expert_offset local_num_experts routed_scaling_factor routing_method_type= "
        "use_shuffled_weight= weight_layout= do_finalize= enable_pdl= gemm1_lora_delta= output= "
        "tune_max_num_tokens= fp8_quantization_type= activation_type= gemm1_alpha= gemm1_beta= "
        "gemm1_clamp_limit= valid_hidden_size= valid_intermediate_size=",
    ),
    ("flashinfer.fused_moe", "trtllm_fp4_block_scale_routed_moe"): (
        "flashinfer/fused_moe/core.py",
        "topk_ids routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale "
        "gemm1_bias gemm1_alpha gemm1_beta gemm1_clamp_limit gemm2_weights gemm2_weights_scale "
        "gemm2_bias output1_scale_scalar output1_scale_gate_scalar output2_scale_scalar num_experts "
        "top_k n_group topk_group intermediate_size local_expert_offset local_num_experts "
        "routed_scaling_factor routing_method_type= do_finalize= enable_pdl= activation_type= "
        "per_token_scale= output= tune_max_num_tokens= gemm1_lora_delta= valid_hidden_size= "
        "valid_intermediate_size= num_fused_shared_experts= hidden_states_scale_layout=",
    ),
    ("flashinfer.mla", "trtllm_batch_decode_with_kv_cache_mla"): (
        "flashinfer/mla/_core.py",
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables "
        "seq_lens max_seq_len sparse_mla_top_k= out= bmm1_scale= bmm2_scale= sinks= "
        "skip_softmax_threshold_scale_factor= enable_pdl= backend= is_var_seq= uses_shared_paged_kv_idx= "
        "lse= return_lse= cute_dsl_impl= kv_scale_format= cum_seq_lens_q= max_q_len= "
        "multi_ctas_kv_counter_buffer= sparse_mla_top_k_lens= enable_dcp= cp_world= cp_rank= "
        "causal_seqlens_kv_global= use_fp16_softmax= return_lse_base=",
    ),
    ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"): (
        "flashinfer/decode.py",
        "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale= bmm2_scale= "
        "window_left= out= out_dtype= o_sf_scale= o_sf_vec_size= sinks= kv_layout= enable_pdl= backend= "
        "q_len_per_req= o_scale= mask= max_q_len= cum_seq_lens_q= skip_softmax_threshold_scale_factor= "
        "kv_cache_sf= uses_shared_paged_kv_idx= lse= return_lse= bmm1_scale_log2= "
        "multi_ctas_kv_counter_buffer= enable_block_sparse_attention= cp_world= cp_rank= "
        "causal_seqlens_kv_global= bf16q_fp8kv_transform_mode= request_order= request_order_plan=",
    ),
    ("flashinfer.prefill", "trtllm_batch_context_with_kv_cache"): (
        "flashinfer/prefill.py",
        "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale "
        "bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv window_left= out= out_dtype= o_sf_scale= "
        "o_sf_vec_size= kv_layout= enable_pdl= sinks= kv_cache_sf= skip_softmax_threshold_scale_factor= "
        "uses_shared_paged_kv_idx= causal= lse= return_lse= multi_ctas_kv_counter_buffer= "
        "use_fp16_softmax= uses_spcompress= backend=",
    ),
    ("flashinfer.prefill", "trtllm_ragged_attention_deepseek"): (
        "flashinfer/prefill.py",
        "query key value workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale "
        "batch_size window_left cum_seq_lens_q cum_seq_lens_kv enable_pdl is_causal return_lse "
        "attention_sinks= skip_softmax_threshold_scale_factor= out= lse= sage_attn_sfs= "
        "num_elts_per_sage_attn_blk= backend= q_seq_lens_cpu= kv_seq_lens_cpu= use_fp16_softmax= "
        "uses_spcompress= skip_all_rows_active_check=",
    ),
    ("flashinfer.mla", "BatchMLAPagedAttentionWrapper.__init__"): (
        "flashinfer/mla/_batch_mla/_wrapper.py",
        "float_workspace_buffer use_cuda_graph= qo_indptr= kv_indptr= kv_indices= kv_len_arr= backend=",
    ),
    ("flashinfer.mla", "BatchMLAPagedAttentionWrapper.plan"): (
        "flashinfer/mla/_batch_mla/_wrapper.py",
        "qo_indptr= kv_indptr= kv_indices= kv_len_arr= num_heads= head_dim_ckv= head_dim_kpe= page_size= "
        "causal= sm_scale= q_data_type= kv_data_type= use_profiler= * metadata= cum_seq_lens_q= "
        "block_tables= seq_lens= max_q_len= query_layout= kv_cache_layout= lse_mode= output_dtype= "
        "output_scale= scale_mode= skip_softmax= enable_pdl= use_sinks=",
    ),
    ("flashinfer.mla", "BatchMLAPagedAttentionWrapper.run"): (
        "flashinfer/mla/_batch_mla/_wrapper.py",
        "q_nope= q_pe= ckv_cache= kpe_cache= out= lse= return_lse= profiler_buffer= kv_len= page_table= "
        "return_lse_base_on_e= o_scale= * query= kv_cache= ckv_scale= ckv_scale_arr= kpe_scale= sinks= "
        "skip_softmax_threshold_scale_factor= bmm1_scale= bmm2_scale=",
    ),
    ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.__init__"): (
        "flashinfer/prefill.py",
        "float_workspace_buffer kv_layout= use_cuda_graph= qo_indptr_buf= kv_indptr_buf= "
        "custom_mask_buf= mask_indptr_buf= backend= jit_args= jit_kwargs= variant_owns_mask=",
    ),
    ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.plan"): (
        "flashinfer/prefill.py",
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo= custom_mask= "
        "packed_custom_mask= causal= pos_encoding_mode= use_fp16_qk_reduction= window_left= "
        "logits_soft_cap= sm_scale= rope_scale= rope_theta= q_data_type= kv_data_type= o_data_type= "
        "non_blocking= prefix_len_ptr= token_pos_in_items_ptr= token_pos_in_items_len= max_item_len_ptr= "
        "fixed_split_size= disable_split_kv= seq_lens= seq_lens_q= max_token_per_sequence= "
        "max_sequence_kv= v_indptr= o_indptr= uniform_q_len=",
    ),
    ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.run"): (
        "flashinfer/prefill.py",
        "q k v *args q_scale= k_scale= v_scale= o_scale= out= lse= return_lse= lse_base= lse_layout= "
        "enable_pdl= kv_cache_sf=",
    ),
    ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.__init__"): (
        "flashinfer/prefill.py",
        "float_workspace_buffer kv_layout= use_cuda_graph= qo_indptr_buf= paged_kv_indptr_buf= "
        "paged_kv_indices_buf= paged_kv_last_page_len_buf= custom_mask_buf= mask_indptr_buf= backend= "
        "jit_args= jit_kwargs= variant_owns_mask=",
    ),
    ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.plan"): (
        "flashinfer/prefill.py",
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads "
        "head_dim_qk page_size head_dim_vo= custom_mask= packed_custom_mask= causal= pos_encoding_mode= "
        "use_fp16_qk_reduction= sm_scale= window_left= logits_soft_cap= rope_scale= rope_theta= "
        "q_data_type= kv_data_type= o_data_type= non_blocking= prefix_len_ptr= token_pos_in_items_ptr= "
        "token_pos_in_items_len= max_item_len_ptr= seq_lens= seq_lens_q= block_tables= "
        "max_token_per_sequence= max_sequence_kv= fixed_split_size= disable_split_kv= uniform_q_len=",
    ),
    ("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.__init__"): (
        "flashinfer/decode.py",
        "float_workspace_buffer kv_layout= use_cuda_graph= use_tensor_cores= paged_kv_indptr_buffer= "
        "paged_kv_indices_buffer= paged_kv_last_page_len_buffer= backend= jit_args=",
    ),
    ("transformer_engine.pytorch.cpp_extensions", "general_gemm"): (
        "transformer_engine/pytorch/cpp_extensions/gemm.py",
        "A B out_dtype= quantization_params= gelu= gelu_in= alpha= beta= accumulate= layout= out= bias= "
        "use_split_accumulator= grad= ub= ub_type= extra_output= bulk_overlap=",
    ),
    ("transformer_engine.pytorch.cpp_extensions", "general_grouped_gemm"): (
        "transformer_engine/pytorch/cpp_extensions/gemm.py",
        "A B out quantization_params out_dtype layout= m_splits= gelu= grad= accumulate= bias= use_bias= "
        "use_split_accumulator= D_dtype= single_output=",
    ),
    ("transformer_engine.pytorch.attention.rope", "apply_rotary_pos_emb"): (
        "transformer_engine/pytorch/attention/rope.py",
        "t freqs tensor_format= start_positions= interleaved= fused= cu_seqlens= cp_size= cp_rank=",
    ),
    ("transformer_engine.pytorch", "moe_permute"): (
        "transformer_engine/pytorch/permutation.py",
        "inp routing_map num_out_tokens max_token_num= map_type=",
    ),
    ("transformer_engine.pytorch", "moe_unpermute"): (
        "transformer_engine/pytorch/permutation.py",
        "inp row_id_map merging_probs= restore_shape= map_type= probs= pad_offsets=",
    ),
    ("transformer_engine.pytorch", "DotProductAttention.__init__"): (
        "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py",
        "num_attention_heads kv_channels num_gqa_groups= attention_dropout= qkv_format= attn_mask_type= "
        "window_size= bottom_right_diagonal= softcap= sequence_parallel= tp_size= get_rng_state_tracker= "
        "tp_group= layer_number= attention_type= cp_group= cp_global_ranks= cp_stream= cp_comm_type= "
        "softmax_scale= softmax_type= return_max_logit= name=",
    ),
    ("transformer_engine.pytorch", "DotProductAttention.forward"): (
        "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py",
        "query_layer= key_layer= value_layer= attention_mask= qkv_format= cu_seqlens_q= cu_seqlens_kv= "
        "cu_seqlens_q_padded= cu_seqlens_kv_padded= max_seqlen_q= max_seqlen_kv= attn_mask_type= "
        "window_size= bottom_right_diagonal= softcap= checkpoint_core_attention= "
        "core_attention_bias_type= core_attention_bias= alibi_slopes= fast_zero_fill= inference_params= "
        "pad_between_seqs= fp8_output= bf16_backward= num_splits= score_mod= score_mod_bprop= "
        "score_mod_tensors= score_mod_bprop_tensors= qkv_layer= kv_layer= qkv_interleave_dim= "
        "thd_attention_policies= thd_attention_policy_dispatch=",
    ),
    ("transformer_engine.pytorch.tensor", "Float8Quantizer.__init__"): (
        "transformer_engine/pytorch/tensor/float8_tensor.py",
        "scale amax fp8_dtype * rowwise= columnwise=",
    ),
    ("transformer_engine.pytorch.tensor", "Float8CurrentScalingQuantizer.__init__"): (
        "transformer_engine/pytorch/tensor/float8_tensor.py",
        "fp8_dtype device * rowwise= columnwise= use_existing_amax= with_amax_reduction= "
        "amax_reduction_group= force_pow_2_scales= amax_epsilon= scale= amax=",
    ),
    ("transformer_engine.pytorch.tensor", "Float8BlockQuantizer.__init__"): (
        "transformer_engine/pytorch/tensor/float8_blockwise_tensor.py",
        "fp8_dtype * rowwise columnwise amax_epsilon= force_pow_2_scales= block_scaling_dim=",
    ),
    ("transformer_engine.pytorch.tensor", "MXFP8Quantizer.__init__"): (
        "transformer_engine/pytorch/tensor/mxfp8_tensor.py",
        "fp8_dtype * rowwise= columnwise= with_2d_quantization=",
    ),
    ("transformer_engine.pytorch.tensor", "NVFP4Quantizer.__init__"): (
        "transformer_engine/pytorch/tensor/nvfp4_tensor.py",
        "fp4_dtype= rowwise= columnwise= with_amax_reduction= amax_reduction_group= with_rht= "
        "with_post_rht_amax= with_2d_quantization= stochastic_rounding= row_scaled_nvfp4= "
        "nvfp4_use_4over6= nvfp4_e4m3_max= nvfp4_4over6_err_mode= with_random_sign_mask=",
    ),
    ("vllm.distributed.device_communicators.custom_all_reduce", "CustomAllreduce.__init__"): (
        "vllm/distributed/device_communicators/custom_all_reduce.py",
        "group device max_size= max_all_gather_size= max_mnnvl_all_gather_size= max_reduce_scatter_size= "
        "max_mnnvl_reduce_scatter_size= max_mnnvl_multimem_reduce_scatter_size= symm_mem_enabled= * "
        "register_graph_buffers=",
    ),
}


def signature(arguments: str) -> inspect.Signature:
    """A line of :data:`ARGUMENTS` as Python binds it."""
    kind, made = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for word in arguments.split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif word.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            made.append(inspect.Parameter(word[1:], inspect.Parameter.VAR_POSITIONAL))
        else:
            default = None if word.endswith("=") else inspect.Parameter.empty
            made.append(inspect.Parameter(word.removesuffix("="), kind, default=default))
    return inspect.Signature(made)
