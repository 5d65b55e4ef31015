"""What is in the zoo: models that people run, made small, with random weights and inputs; and four
programs around models. Nothing is downloaded.

A family is a model whose result is a tensor or holds one, and a batch of inputs by name. A program
is a loop of its own. Libraries are imported where a family is built, so that a process pays for one.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 128
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
DECODER = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 256}
IMAGE = 32  # pixels a side


class Family(NamedTuple):
    """`build()` makes the model; `draw(generator)` a batch on the host: name -> tensor. `parted`: eager and jitted run one after
    the other, not by turns, since each turn sets the generators, with which cuDNN's recurrent layers begin their dropout anew."""

    library: str
    build: Callable
    draw: Callable
    parted: bool = False


class Program(NamedTuple):
    """`build(device, jit, calls)` answers with run() and the functions that it jitted; run() with tensors to
    compare, and does `calls` times what `unit` says."""

    library: str
    build: Callable
    unit: str


# --- inputs ------------------------------------------------------------------------------------


def ids(g, length=16, batch=2):
    return torch.randint(3, VOCABULARY, (batch, length), generator=g)


def tokens(g):
    return {"input_ids": ids(g)}


def padded(g, length=16):
    """Sentences of several lengths, as a tokenizer hands them out."""
    lengths = torch.randint(length // 2, length, (2, 1), generator=g)
    return {"input_ids": ids(g, length), "attention_mask": (torch.arange(length) < lengths).long()}


def translation(g):
    return {"input_ids": ids(g), "decoder_input_ids": ids(g, 8)}


def image(g, name="x", side=IMAGE):
    return {name: torch.randn(2, 3, side, side, generator=g)}


def vector(g, name="input", features=64, batch=32):
    return {name: torch.randn(batch, features, generator=g)}


def sequence(g):
    return {"input": torch.randn(4, 12, 32, generator=g)}


def graph(g, nodes=64, edges=256):
    """One graph, whose features change; of another one at each call the layers would read another mask."""
    ends = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    return {"x": torch.randn(nodes, 16, generator=g), "edge_index": ends}


def sound(g):
    spectrum = torch.randn(2, 16, 128, generator=g)
    return {"input_features": spectrum, "decoder_input_ids": ids(g, 8)}


def waveform(g):
    return {"input_values": torch.randn(2, 960, generator=g)}


def captioned(g):
    return tokens(g) | image(g, "pixel_values")


# --- libraries ---------------------------------------------------------------------------------


def from_transformers(model, config, dtype=None, **sizes):
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).to(dtype)


def clip():
    tower = {k: v for k, v in TEXT.items() if k != "vocab_size"}
    text = {**TEXT, "projection_dim": 32, "eos_token_id": 2}
    vision = {**tower, "image_size": IMAGE, "patch_size": 8, "projection_dim": 32}
    return from_transformers(
        "CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=32
    )


def lora():
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama(), config)


def llama():
    return from_transformers("LlamaForCausalLM", "LlamaConfig", **DECODER)


def from_torchvision(name, **sizes):
    import torchvision

    return getattr(torchvision.models, name)(num_classes=10, **sizes)


def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths = (16, 32, 64, None)
    stages = [CNBlockConfig(a, b, 1) for a, b in zip(widths, widths[1:], strict=False)]
    return ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=10)


def efficientnet():
    """A block of each kind that EfficientNet-B0 has."""
    from torchvision.models import EfficientNet
    from torchvision.models.efficientnet import MBConvConfig

    shapes = ((1, 3, 1, 32, 16), (6, 3, 2, 16, 24), (6, 5, 2, 24, 40), (6, 5, 1, 40, 40))
    blocks = [MBConvConfig(*shape, num_layers=1, width_mult=1.0, depth_mult=1.0) for shape in shapes]
    return EfficientNet(blocks, dropout=0.2, num_classes=10)


def vgg():
    """VGG-11, a quarter as wide, under a smaller head: the usual one has 120 million weights."""
    from torchvision.models import vgg

    widths = [width if width == "M" else width // 4 for width in vgg.cfgs["A"]]
    head = [nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)]
    return nn.Sequential(vgg.make_layers(widths), *head)


def densenet():
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=10)


def swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        [4, 4], 32, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10
    )


def vision_transformer():
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        IMAGE, 8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )


def regnet():
    from torchvision.models import RegNet
    from torchvision.models.regnet import BlockParams

    blocks = BlockParams.from_init_params(depth=6, w_0=24, w_a=36.0, w_m=2.5, group_width=8)
    return RegNet(blocks, num_classes=10)


def segmentation(kind):
    """Half a ResNet-18 under a head that labels every pixel."""
    from torchvision.models import resnet18
    from torchvision.models import segmentation as s
    from torchvision.models._utils import IntermediateLayerGetter

    trunk = IntermediateLayerGetter(resnet18(), {"layer2": "out"})
    if kind == "fcn":
        return s.FCN(trunk, s.fcn.FCNHead(128, 10))
    return s.DeepLabV3(trunk, s.deeplabv3.DeepLabHead(128, 10, (2, 4)))


def from_timm(name, **sizes):
    import timm

    return timm.create_model(name, num_classes=10, **sizes)


def mixer():
    from timm.models import MlpMixer

    return MlpMixer(num_classes=10, img_size=IMAGE, patch_size=8, num_blocks=2, embed_dim=64)


def from_geometric(name, **sizes):
    from torch_geometric import nn as geometric

    return getattr(geometric, name)(16, 32, num_layers=2, out_channels=8, dropout=0.1, **sizes)


# --- plain torch -------------------------------------------------------------------------------


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def masked_sequence(g, length=12):
    lengths = torch.randint(length // 2, length, (4, 1), generator=g)
    mask = torch.arange(length) >= lengths
    return {"src": torch.randn(4, length, 64, generator=g), "src_key_padding_mask": mask}


def mlp():
    hidden = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


class UNet(nn.Module):
    """Down twice and up again, each level with what its counterpart saw."""

    def __init__(self, width=16):
        super().__init__()
        conv = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())  # noqa: E731
        self.down = nn.ModuleList([conv(3, width), conv(width, 2 * width), conv(2 * width, 4 * width)])
        self.up = nn.ModuleList([conv(6 * width, 2 * width), conv(3 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        seen = []
        for level in self.down:
            x = level(x)
            seen.append(x)
            x = F.max_pool2d(x, 2)
        x = seen.pop()
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
            x = level(torch.cat([x, seen.pop()], dim=1))
        return self.out(x)


class DLRM(nn.Module):
    """Recommendation: embeddings and a bottom MLP's result, multiplied pair by pair, into a top MLP."""

    def __init__(self, tables=8, rows=100, width=16):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, offset=1))
        self.top = nn.Sequential(nn.Linear(width + self.pairs.shape[1], 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, sparse):
        dense = self.bottom(dense)
        every = [dense, *(table(i) for table, i in zip(self.tables, sparse, strict=True))]
        every = torch.stack(every, dim=1)
        products = every @ every.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], dim=1))


def clicks(g):
    return vector(g, "dense", 13) | {"sparse": torch.randint(100, (8, 32, 1), generator=g)}


class Recurrent(nn.Module):
    """A recurrent network's last output, classified."""

    def __init__(self, kind):
        super().__init__()
        self.body = kind(32, 48, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(48, 10)

    def forward(self, input):
        out, _ = self.body(input)
        return self.head(out[:, -1])


# --- programs ----------------------------------------------------------------------------------


def generation(device, jit, calls, batch=2, prompt=8):
    """Llama under `generate` with a static cache, its forward jitted; greedy."""
    model = llama().to(device).eval()
    forward = model.forward = jit(model.forward)
    start = ids(torch.Generator().manual_seed(0), prompt, batch).to(device)
    how = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0, "use_cache": True}

    def run():
        with torch.no_grad():
            return [model.generate(start, max_new_tokens=calls, **how)]

    return run, [forward]


def decoding(device, jit, calls, batch=2, eos=2):
    """Llama with a static cache in a loop: one jitted function makes the next token, and the loop
    asks whether all sentences have ended."""
    from transformers import StaticCache

    model = llama().to(device).eval()
    start = ids(torch.Generator().manual_seed(0), 1, batch).to(device)

    @jit
    def decode(token, position, cache):
        out = model(token, past_key_values=cache, position_ids=position, use_cache=True)
        return out.logits[:, -1:].argmax(-1)

    def run():
        cache = StaticCache(config=model.config, max_cache_len=calls)
        token, position, said = start, torch.zeros(batch, 1, dtype=torch.long, device=device), []
        with torch.no_grad():
            for _ in range(calls):
                token = decode(token, position, cache)
                said.append(token)
                if (token == eos).all():
                    break
                position = position + 1
        return [torch.cat(said, dim=1)]

    return run, [decode]


class Denoiser(nn.Module):
    """Predicts the noise in x at time t, an int."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(50, 32)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 32))

    def forward(self, x, t):
        at = self.time(torch.full((len(x),), t, device=x.device))
        return self.body(torch.cat([x, at], dim=1))


def sampling(device, jit, calls, steps=50):
    """A diffusion sampler: every step knows its time as an int, and draws noise except at the end."""
    model, kept = Denoiser().to(device).eval(), torch.linspace(0.999, 0.98, steps).tolist()

    @jit
    def denoise(x, t):
        x = (x - (1 - kept[t]) * model(x, t)) / kept[t] ** 0.5
        return x + (1 - kept[t]) ** 0.5 * torch.randn_like(x) if t > 0 else x

    def run():
        states = []
        with torch.no_grad():
            for k in range(calls):
                t = steps - 1 - k % steps
                if t == steps - 1:
                    x = torch.randn(16, 32, device=device)
                x = denoise(x, t)
                states.append(x.clone())
        return states

    return run, [denoise]


def q_learning(device, jit, calls, actions=4, memory=64, batch=16):
    """An epsilon-greedy DQN in a made-up world: acting and learning are jitted, whether to explore is
    Python's `random`, and the action goes to the host."""
    net = lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, actions)).to(device)  # noqa: E731
    online, target = net(), net()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.SGD(online.parameters(), lr=0.01)
    moves = torch.randn(actions, 8, device=device)
    states = torch.zeros(memory, 2, 8, device=device)
    actions_taken, rewards = torch.zeros(memory, dtype=torch.long, device=device), torch.zeros(memory, device=device)

    @jit
    def act(state):
        with torch.no_grad():
            return online(state).argmax()

    @jit
    def learn(chosen):
        before, after = states[chosen].unbind(1)
        with torch.no_grad():
            goal = rewards[chosen] + 0.9 * target(after).amax(1)
        value = online(before).gather(1, actions_taken[chosen, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run():
        state, losses = torch.zeros(8, device=device), []
        for k in range(calls):
            explore = random.random() < max(0.05, 1 - k / 100)
            action = random.randrange(actions) if explore else act(state).item()
            after = (0.9 * state + moves[action]).tanh()
            row = k % memory
            states[row, 0], states[row, 1] = state, after
            actions_taken[row], rewards[row] = action, after.sum()
            chosen = torch.randint(min(k + 1, memory), (batch,), device=device)
            losses.append(learn(chosen).clone())
            state = after
            if k % 50 == 49:
                target.load_state_dict(online.state_dict())
        return [*losses, *online.state_dict().values()]

    return run, [act, learn]


# --- the lists ---------------------------------------------------------------------------------


def text(model, config, draw=tokens, **more):
    return Family("transformers", partial(from_transformers, model, config, **TEXT | more), draw)


def decoder(model, config, draw=tokens, **more):
    return Family("transformers", partial(from_transformers, model, config, **DECODER | more), draw)


def other(model, config, draw, **sizes):
    return Family("transformers", partial(from_transformers, model, config, **sizes), draw)


def vision(name, **sizes):
    return Family("torchvision", partial(from_torchvision, name, **sizes), image)


def timm(name, **sizes):
    return Family("timm", partial(from_timm, name, **sizes), image)


def geometric(name, **sizes):
    return Family("torch_geometric", partial(from_geometric, name, **sizes), graph)


def plain(build, draw):
    return Family("torch", build, draw)


VIT = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": IMAGE, "patch_size": 8}

FAMILIES = {
    "bert": text("BertForMaskedLM", "BertConfig", padded),
    "bert_unpadded": text("BertForMaskedLM", "BertConfig"),
    "roberta": text("RobertaForMaskedLM", "RobertaConfig", padded),
    "distilbert": other(
        "DistilBertForMaskedLM", "DistilBertConfig", padded,
        dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=VOCABULARY,
    ),
    "electra": text("ElectraForMaskedLM", "ElectraConfig", padded, embedding_size=64),
    "deberta_v2": text(
        "DebertaV2ForMaskedLM", "DebertaV2Config", padded,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
    ),
    "albert": text("AlbertForMaskedLM", "AlbertConfig", padded, embedding_size=32),
    "mpnet": text("MPNetForMaskedLM", "MPNetConfig", padded),
    "llama": decoder("LlamaForCausalLM", "LlamaConfig"),
    "llama_padded": decoder("LlamaForCausalLM", "LlamaConfig", padded),
    "llama_uncached": decoder("LlamaForCausalLM", "LlamaConfig", use_cache=False),
    "mistral": decoder("MistralForCausalLM", "MistralConfig"),
    "qwen2": decoder("Qwen2ForCausalLM", "Qwen2Config"),
    "gemma": decoder("GemmaForCausalLM", "GemmaConfig", head_dim=16),
    "phi": decoder("PhiForCausalLM", "PhiConfig"),
    "opt": other(
        "OPTForCausalLM", "OPTConfig", tokens, hidden_size=64, ffn_dim=128, num_hidden_layers=2,
        num_attention_heads=4, vocab_size=VOCABULARY, word_embed_proj_dim=64,
    ),
    "gpt2": other(
        "GPT2LMHeadModel", "GPT2Config", tokens, n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY
    ),
    "gpt_neox": text("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    # torch's grouped matmul reads on the host what goes to which expert, unless it is of bfloat16.
    "mixtral": decoder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, dtype=torch.bfloat16),
    "mamba": other(
        "MambaForCausalLM", "MambaConfig", tokens,
        hidden_size=64, state_size=8, num_hidden_layers=2, vocab_size=VOCABULARY,
    ),
    "t5": other(
        "T5ForConditionalGeneration", "T5Config", translation, d_model=64, d_ff=128, d_kv=16,
        num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0,
    ),
    "bart": other(
        "BartForConditionalGeneration", "BartConfig", translation, d_model=64, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, vocab_size=VOCABULARY,
    ),
    "whisper": other(
        "WhisperForConditionalGeneration", "WhisperConfig", sound, d_model=64, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, vocab_size=VOCABULARY, max_source_positions=64, num_mel_bins=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "vit": other("ViTForImageClassification", "ViTConfig", partial(image, name="pixel_values"), **VIT),
    "clip": Family("transformers", clip, captioned),
    "wav2vec2": other(
        "Wav2Vec2Model", "Wav2Vec2Config", waveform, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, conv_dim=(32, 32), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    "llama_lora": Family("peft", lora, tokens),
    "resnet18": vision("resnet18"),
    "mobilenet_v3_small": vision("mobilenet_v3_small"),
    "efficientnet_b0": Family("torchvision", efficientnet, image),
    "convnext": Family("torchvision", convnext, image),
    "vgg11": Family("torchvision", vgg, partial(image, name="input")),
    "densenet": Family("torchvision", densenet, image),
    "swin": Family("torchvision", swin, image),
    "vit_b": Family("torchvision", vision_transformer, image),
    "regnet": Family("torchvision", regnet, image),
    "fcn": Family("torchvision", partial(segmentation, "fcn"), partial(image, side=64)),
    "deeplab": Family("torchvision", partial(segmentation, "deeplab"), partial(image, side=64)),
    "timm_resnet": timm("resnet10t"),
    "timm_vit": timm("vit_tiny_patch16_224", img_size=IMAGE, patch_size=8, embed_dim=64, depth=2, num_heads=4),
    "timm_mixer": Family("timm", mixer, image),
    "timm_edgenext": timm("edgenext_xx_small", depths=(1, 1, 1, 1)),
    "timm_mobilenetv3": timm("mobilenetv3_small_050"),
    "timm_convnext": timm("convnext_atto", depths=(1, 1, 1, 1)),
    "gcn": geometric("GCN"),
    "gat": geometric("GAT", heads=2),
    "graph_sage": geometric("GraphSAGE"),
    "gin": geometric("GIN"),
    "encoder_padded": plain(encoder, masked_sequence),
    "lstm": plain(partial(Recurrent, nn.LSTM), sequence)._replace(parted=True),
    "gru": plain(partial(Recurrent, nn.GRU), sequence)._replace(parted=True),
    "mlp_batchnorm": plain(mlp, vector),
    "unet": plain(UNet, image),
    "dlrm": plain(DLRM, clicks),
}  # fmt: skip

PROGRAMS = {
    "llama_generate": Program("transformers", generation, "tokens"),
    "llama_loop": Program("transformers", decoding, "tokens"),
    "diffusion": Program("torch", sampling, "steps"),
    "dqn": Program("torch", q_learning, "steps"),
}
