"""An exported module computes what the module does, for every size, and survives being copied."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from auto_deploy_ext.embedded.export import ExportedGraphModule, dump_graph, export_module, load_graph, retarget_device


class Small(nn.Module):
    """Has an embedding that its forward does not use, a head tied to it, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(11, 8)
        self.body.proj = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.body.embed.weight
        self.register_buffer("table", torch.arange(11.0))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.spare = nn.Linear(3, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.body.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        hidden = self.body.proj(inputs_embeds) * self.scale + (position_ids + steps)[..., None]
        return self.head(hidden), hidden


def inputs(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + sequence)
    return {
        "inputs_embeds": torch.randn(batch, sequence, 8, generator=generator),
        "position_ids": torch.arange(sequence).repeat(batch, 1),
    }


@pytest.fixture(scope="module")
def eager() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def exported(eager: Small) -> ExportedGraphModule:
    return export_module(eager, inputs(2, 5), role="target", kept=("spare", "table"))


@pytest.mark.parametrize(("batch", "sequence"), [(2, 5), (1, 1), (1, 9), (7, 1), (3, 4)])
def test_batch_and_sequence_stay_dynamic(
    eager: Small, exported: ExportedGraphModule, batch: int, sequence: int
) -> None:
    got, expected = exported(**inputs(batch, sequence)), eager(**inputs(batch, sequence))
    assert isinstance(got, tuple) and len(got) == 2
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_arguments_are_flat_and_parameters_are_the_modules_own(eager: Small, exported: ExportedGraphModule) -> None:
    assert [node.target for node in exported.graph.find_nodes(op="placeholder")] == ["inputs_embeds", "position_ids"]
    assert [node.op for node in exported.graph.nodes][:3] == ["placeholder", "placeholder", "get_attr"]
    assert exported.get_parameter("body.proj.weight") is eager.body.proj.weight
    assert exported.role == "target"


def test_only_saved_buffers_are_in_the_state_dict(eager: Small, exported: ExportedGraphModule) -> None:
    assert set(exported.state_dict()) == set(eager.state_dict())
    assert "scale" not in exported.state_dict()


def test_export_leaves_no_check_that_would_pin_the_device(exported: ExportedGraphModule) -> None:
    assert not [node for node in exported.graph.nodes if "assert" in str(node.target) or "guard" in str(node.target)]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda gm: pickle.loads(pickle.dumps(gm)),
    "pickle of a deepcopy": lambda gm: pickle.loads(pickle.dumps(copy.deepcopy(gm))),
    "inside another module": lambda gm: copy.deepcopy(nn.ModuleList([gm]))[0],
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_graph_meta_and_unused_attributes(exported: ExportedGraphModule, how: str) -> None:
    exported.meta["active_args"] = ("position_ids",)
    marked = next(node for node in exported.graph.nodes if node.op == "call_function")
    marked.meta["note"] = ("kept",)
    clone = COPIES[how](exported)
    assert isinstance(clone, ExportedGraphModule)
    assert clone.code == exported.code
    assert [(n.op, n.name, str(n.target)) for n in clone.graph.nodes] == [
        (n.op, n.name, str(n.target)) for n in exported.graph.nodes
    ]
    assert next(node for node in clone.graph.nodes if node.name == marked.name).meta["note"] == ("kept",)
    assert all("nn_module_stack" in n.meta for n in clone.graph.nodes if "nn_module_stack" in n.meta)
    assert clone.meta == exported.meta
    assert torch.equal(clone(**inputs(3, 4))[0], exported(**inputs(3, 4))[0])
    assert torch.equal(clone.spare.weight, exported.spare.weight)
    assert torch.equal(clone.table, exported.table)
    assert set(clone.state_dict()) == set(exported.state_dict())


@pytest.mark.parametrize("how", COPIES)
def test_copies_have_embeddings_of_their_own_that_stay_tied(exported: ExportedGraphModule, how: str) -> None:
    clone = COPIES[how](exported)
    embedding, head = clone.get_input_embeddings(), clone.get_output_embeddings()
    assert embedding is clone.body.embed and isinstance(embedding, nn.Embedding)
    assert embedding.weight is head.weight and embedding.weight is not exported.body.embed.weight
    with torch.no_grad():
        embedding.weight.zero_()
    assert clone(**inputs(1, 2))[0].abs().max() == 0
    assert exported(**inputs(1, 2))[0].abs().max() > 0


def test_moving_keeps_the_embeddings_and_moves_device_constants(exported: ExportedGraphModule) -> None:
    clone = copy.deepcopy(exported).to(torch.float64)
    assert clone.get_input_embeddings().weight.dtype == torch.float64
    on_cpu = clone(inputs(1, 3)["inputs_embeds"].double(), inputs(1, 3)["position_ids"])
    assert on_cpu[1].dtype == torch.float64
    constants = [n.kwargs["device"] for n in clone.graph.nodes if n.kwargs.get("device") is not None]
    assert constants and all(device == torch.device("cpu") for device in constants)
    assert retarget_device(clone, torch.device("cuda", 0)) == len(constants)
    assert all(
        n.kwargs["device"] == torch.device("cuda", 0) for n in clone.graph.nodes if n.kwargs.get("device") is not None
    )


def test_pickling_keeps_an_argument_whose_node_has_another_name() -> None:
    graph = fx.Graph()
    first = graph.placeholder("x")
    taken = graph.create_node("call_function", torch.relu, (first,), name="y")
    with graph.inserting_after(first):
        second = graph.placeholder("y")
    graph.output(graph.call_function(torch.sub, (taken, second)))
    assert second.name != "y"
    gm = pickle.loads(pickle.dumps(ExportedGraphModule({}, graph)))
    assert [node.target for node in gm.graph.find_nodes(op="placeholder")] == ["x", "y"]
    assert gm(x=torch.tensor(5.0), y=torch.tensor(2.0)) == 3.0


def test_a_dumped_graph_drops_only_what_cannot_be_pickled(exported: ExportedGraphModule) -> None:
    graph = copy.deepcopy(exported.graph)
    node = next(node for node in graph.nodes if "val" in node.meta and node.op == "call_function")
    node.meta["callback"] = lambda: None
    node.meta["active_args"] = ("a", "b")
    loaded = load_graph(pickle.loads(pickle.dumps(dump_graph(graph))))
    kept = next(other for other in loaded.nodes if other.name == node.name).meta
    assert kept["active_args"] == ("a", "b")
    assert "val" not in kept and "callback" not in kept
    assert kept["nn_module_stack"] == node.meta["nn_module_stack"]


def test_cleanup_of_unused_submodules_spares_the_embeddings(exported: ExportedGraphModule) -> None:
    clone = copy.deepcopy(exported)
    clone.delete_all_unused_submodules()
    assert clone.get_input_embeddings() is not None and clone.spare is not None
