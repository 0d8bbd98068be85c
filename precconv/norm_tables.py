"""What normalisation layers and their tensors are called, in every ecosystem that has a name for them."""

from __future__ import annotations

import re

# Tables: what the tensors of a norm are called.

#: What multiplies; the first that a module has is its scale.
SCALES = (
    "weight",  # torch
    "gamma",  # Keras, TF BERT, lucidrains, Wan VAE, GRN
    "scale",  # flax, Haiku, BFL flux, torchtune, gpt-oss
    "g",  # GPT-2 in TF, lucidrains
    "w",  # TransformerLens
    "gain",  # BigGAN
    "a_2",  # the Annotated Transformer
    "affine_weight",  # RevIN, Equiformer
    "temp",  # Zaya
    "w_norm",  # LyCORIS
    "diff",  # ComfyUI's difference files
    "alpha",  # Kyutai's Moshi
)
#: What adds, in the same libraries.
SHIFTS = (
    *("bias", "beta", "b", "b_2", "affine_bias", "b_norm", "diff_b"),
    "offset",  # Haiku
    "loc",  # ActNorm of CompVis
    "shift",  # I-BERT
)
#: Running statistics.
STATISTICS = frozenset(
    (
        *("running_mean", "running_var"),  # torch
        *("moving_mean", "moving_variance", "moving_var"),  # Keras, TF
        *("stored_mean", "stored_var", "running_means", "running_vars"),  # two ports of BigGAN
        "_variance",  # Paddle; not its _mean, which data normalisers use
    )
)
#: Further tensors of a norm, never enough alone.
EXTRAS = (
    "tau",  # FilterResponseNorm
    "v",  # EvoNorm
    "mean_scale",  # PyG GraphNorm
    "log_scale",  # Zipformer BiasNorm
    *("mean", "var"),  # flax BatchNorm
)
#: What can stand beside a scale, or (shifts) alone.
OFFSETS = frozenset((*SHIFTS, *EXTRAS))
#: In a module, but no evidence of anything: counters, flags and Transformer Engine's pickled state.
IGNORED = frozenset(("num_batches_tracked", "initialized", "_extra_state"))

#: Leaf sets which make a norm of a module without a telling name, when both have one shape.
PAIRS = (
    ("weight", "bias"),
    ("gamma", "beta"),
    ("g", "b"),
    ("a_2", "b_2"),
    ("scale", "bias"),
    ("scale", "offset"),
    ("affine_weight", "affine_bias"),
    ("logs", "bias"),  # ActNorm of Glow-TTS
    ("log_scale", "shift"),  # ActNorm of nflows
)
#: Scales which Linears and convolutions have too: with broadcast dimensions they can be those of one channel.
PLAIN = frozenset(("weight", "scale", "w"))
#: Scales that no Linear has, so that a matrix of them in a norm is one row a head.
PER_HEAD = frozenset(("gamma", "g", "affine_weight"))
#: Leaves which make a norm alone: RMSNorm without a telling name.
LONE = ("weight", "gamma", "g", "a_2")

# Tables: what the modules are called.

#: ``norm`` anywhere but in "normal(s)"; the abbreviations as a word (``ln_f``, ``bn1``, ``before_rms``), at
#: the end (``skipbn``, ``subln``), with one letter (``lnx``), or in capitals in camel case (``preLN1``).
NORM = re.compile(
    r"""norm(?!als?(?:_|\d|$))
    | (?:^|_)(?:ln|bn|gn|rms|grn|frn|revin)s?\d*(?:_|$)
    | (?:ln|bn)s?\d*$
    | ^(?:ln|bn|gn)[a-z]?\d*$""",
    re.VERBOSE,
)
CAMEL_CASE = re.compile(r"(?<=[a-z])(?:LN|BN|GN|RMS)\d*$")
#: A container of norms: ``norms``, ``hidden_states_norms``, ``bns``, and one norm for each of several inputs.
NORMS = re.compile(r"(?:norms|(?:^|_)(?:ln|bn|gn)s)$")
#: Components that PEFT puts between a module and its tensors.
PEFT = re.compile(r"\.(?:base_layer|original_module|(?:modules_to_save|ln_tuning_layers)(?:\.[^.]+)?)$")
PEFT_PARTS = ("base_layer", "original_module", "modules_to_save", "ln_tuning_layers")
#: A tensor whose own name says it: ``layer_norm_weight`` (Transformer Engine), ``attn_norm``, ``ln_g``.
OWN_NAME = re.compile(
    r"(?:(?<!weight_)(?<!spectral_)(?<!grad_)(?<!max_)norm|(?:^|_)(?:ln|bn|gn|rms))(?:_?(?:\d+|[qkvx]))?"
    r"(?:_?(?:weight|bias|gamma|beta|scale|g|b|running_mean|running_var))?$"
)
#: Norms of queries and keys, which some models give one row a head: Cohere, Chameleon, OLMo hybrids.
QUERY_KEY = re.compile(
    r"(?:^|_)(?:q|k|qk|query|key)_?(?:layer_?)?(?:norm|ln)\d*$|(?:norm|ln)_?(?:added_)?(?:q|k|query|key)$"
)
#: Modules that scale and shift without normalising: LayerScale, affines, PP-LCNet's ``lab``, FiLM; DoRA.
AFFINE = re.compile(
    r"affine|film|(?:^|_)lora_|(?:^|_|layer)(?:re)?scal(?:e|er|ing|ar)s?(?:_?\d+)?$"
    r"|(?:^|_)(?:lab|ls|gamma|lambda)s?_?\d*$"
)
ACTIVATION = re.compile(r"(?:^|_)(?:act|actv|activ|nonlin|snake)[a-z]*\d*(?:_|$)|relu|activation")
#: What else holds one vector: losses, embeddings, Fourier features, gates, tables; GGUF's sinks and mixes.
VECTOR = re.compile(
    r"emb|token|loss|criterion|fourier|freq|time_proj|timestep|bias|table|mask|temperature|gate|gating|router"
    r"|query|codebook|quant|window|filter|alpha|sink|rope|decay|(?:^|_)mix"
)

#: A lone vector shorter than this is a mixing weight or a class weight more often than a norm.
MIN_LONE = 8
#: No rule tells one digit of a component from another.
DIGITS = bytes.maketrans(b"123456789", b"000000000")
#: LDM's EMA copy drops the dots of a name: ``model_ema.diffusion_modelout0weight``.
LDM_EMA = re.compile(r"(model_ema\.[^.]+?)(weight|bias)$")
