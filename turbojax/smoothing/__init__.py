"""Smoothing for INT4 weights and keys: CAS, PTS, RPN, CRS, and their folding into a layer.

All of them are rescalings that leave a model the same in exact arithmetic and make what gets
quantized more even. FireQ (Baek et al., 2025), sections 3.1.2 and 3.2.1.
"""

from turbojax.smoothing.attention import channel_rope_scale as channel_rope_scale
from turbojax.smoothing.attention import rope_preserving_norm as rope_preserving_norm
from turbojax.smoothing.attention import scale_rotated as scale_rotated
from turbojax.smoothing.folding import Smoothing as Smoothing
from turbojax.smoothing.folding import fold_attention_input as fold_attention_input
from turbojax.smoothing.folding import fold_mlp_input as fold_mlp_input
from turbojax.smoothing.folding import fold_per_tensor as fold_per_tensor
from turbojax.smoothing.folding import fold_query_key as fold_query_key
from turbojax.smoothing.folding import fold_up_down as fold_up_down
from turbojax.smoothing.folding import fold_value_output as fold_value_output
from turbojax.smoothing.folding import smooth_layer as smooth_layer
from turbojax.smoothing.layer import LayerWeights as LayerWeights
from turbojax.smoothing.layer import Projection as Projection
from turbojax.smoothing.linear import channel_absmean_scale as channel_absmean_scale
from turbojax.smoothing.linear import per_tensor_scale as per_tensor_scale
from turbojax.smoothing.outliers import Outliers as Outliers
from turbojax.smoothing.outliers import plant_outliers as plant_outliers
from turbojax.smoothing.statistics import KeyStatistics as KeyStatistics
