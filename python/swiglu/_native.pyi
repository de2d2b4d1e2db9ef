from os import PathLike
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, TypeVar, Union, final

__version__: str

# (address, shape, strides in elements, element type, whether it may be written), or what has __dlpack__.
_Tensor = Any
# Tensors of a library, whose type is known to Python alone.
_T = TypeVar("_T")
# The number of a CUDA device and the handle of a stream.
_Place = Tuple[int, int]
# w_gate, w_up, w_down, b_gate, b_up, b_down.
_Weights = Tuple[_Tensor, Optional[_Tensor], Optional[_Tensor], Optional[_Tensor], Optional[_Tensor], Optional[_Tensor]]

class SwigluError(RuntimeError):
    kind: str
    what: Optional[str]
    given: Optional[str]
    expected: Optional[str]

class ShapeError(ValueError):
    kind: str
    what: Optional[str]
    given: Optional[str]
    expected: Optional[str]

@final
class Activation:
    def __new__(cls, name: Union[str, Activation]) -> Activation: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    @property
    def gate(self) -> str: ...
    @property
    def beta(self) -> float: ...
    @property
    def limit(self) -> Optional[float]: ...
    @property
    def limit_behind(self) -> bool: ...
    @property
    def up_offset(self) -> float: ...

@final
class Array:
    @property
    def shape(self) -> Tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Optional[bool] = None
    ) -> Any: ...
    def __dlpack_device__(self) -> Tuple[int, int]: ...

@final
class Door:
    def __new__(
        cls,
        in_force: Sequence[Callable[[], Any]],
        forward_ad: Any,
        grad_enabled: Callable[[], bool],
        empty_like: Callable[..., Any],
        written: Callable[..., None],
        last: Any,
        reasons: Tuple[str, str, str],
    ) -> Door: ...
    def nothing_in_force(self) -> bool: ...
    def activation(
        self,
        op: str,
        gate: _T,
        up: Any,
        layout: Optional[str],
        activation: Union[str, Activation],
        numerics: Optional[str],
        out: Any,
        asks: bool,
    ) -> Optional[_T]: ...
    def layer(
        self,
        op: str,
        x: _T,
        weights: Tuple[Any, ...],
        layout: str,
        activation: Union[str, Activation],
        numerics: Optional[str],
        out: Any,
        asks: bool,
    ) -> Optional[_T]: ...

@final
class Layer:
    @staticmethod
    def load(
        path: Union[str, PathLike[str]],
        reading: Dict[str, Any],
        *,
        kind: str = "mlp",
        device: str = "best",
        dtype: Optional[str] = None,
        activation: Optional[Activation] = None,
        numerics: Optional[str] = None,
        decoded: bool = False,
        allow_non_finite: bool = False,
    ) -> Layer: ...
    @staticmethod
    def pack(
        weights: _Weights, activation: Activation, numerics: Optional[str] = None, arrangement: Optional[str] = None
    ) -> Layer: ...
    @staticmethod
    def borrow(ordinal: int, weights: _Weights, activation: Activation, numerics: Optional[str] = None) -> Layer: ...
    @property
    def kind(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def numerics(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    def workspace_bytes(self, tokens: int) -> int: ...
    def plan(self, tokens: int) -> str: ...
    def explain(self, tokens: int) -> Tuple[str, str]: ...
    def forward(self, x: _Tensor, out: Optional[_Tensor] = None) -> Optional[Array]: ...
    def forward_on(self, place: _Place, x: _Tensor, out: _Tensor, scratch: Tuple[int, int]) -> None: ...

def activation(
    act: Activation,
    numerics: Optional[str],
    arrangement: Optional[str],
    gate: _Tensor,
    up: Optional[_Tensor] = None,
    out: Optional[_Tensor] = None,
    of_pytorch: bool = False,
) -> Optional[Array]: ...
def expect_numerics(name: str) -> None: ...
def cuda_activation(
    place: _Place,
    act: Activation,
    numerics: Optional[str],
    arrangement: Optional[str],
    gate: _Tensor,
    up: Optional[_Tensor],
    out: _Tensor,
) -> None: ...
def activation_backward(
    act: Activation,
    numerics: Optional[str],
    arrangement: Optional[str],
    grad: _Tensor,
    gate: _Tensor,
    up: Optional[_Tensor],
    grad_gate: _Tensor,
    grad_up: Optional[_Tensor],
) -> None: ...
def cuda_activation_backward(
    place: _Place,
    act: Activation,
    numerics: Optional[str],
    arrangement: Optional[str],
    grad: _Tensor,
    gate: _Tensor,
    up: Optional[_Tensor],
    grad_gate: _Tensor,
    grad_up: Optional[_Tensor],
) -> None: ...
def activation_backward_at_once(
    act: Activation,
    numerics: Optional[str],
    arrangement: Optional[str],
    grad: Any,
    gate: Any,
    up: Optional[Any],
    grad_gate: Any,
    grad_up: Optional[Any],
) -> bool: ...
def block_forward(
    place: _Place,
    act: Activation,
    x: Any,
    parts: Tuple[Any, ...],
    y: Optional[Any],
    kept: Optional[Any],
    room: Callable[[int], Any],
) -> None: ...
def block_backward(
    place: _Place,
    act: Activation,
    x: Any,
    grad: Any,
    parts: Tuple[Any, ...],
    kept: Any,
    consumed: bool,
    into: Tuple[Optional[Any], ...],
    biases: Tuple[Optional[Any], ...],
    factors: Tuple[Optional[Any], Optional[Any]],
    add: bool,
    room: Callable[[int], Any],
) -> None: ...
def block_backward_gate_up(
    place: _Place,
    act: Activation,
    grad: Any,
    parts: Tuple[Any, ...],
    kept: Any,
    into: Any,
    room: Callable[[int], Any],
) -> None: ...
def host_block_forward(
    act: Activation, x: _Tensor, parts: Tuple[Optional[_Tensor], ...], y: Optional[_Tensor], kept: Optional[_Tensor]
) -> None: ...
def host_block_backward(
    act: Activation,
    x: _Tensor,
    grad: _Tensor,
    parts: Tuple[Optional[_Tensor], ...],
    kept: _Tensor,
    into: Tuple[Optional[_Tensor], ...],
    biases: Tuple[Optional[_Tensor], ...],
    factors: Tuple[Optional[_Tensor], Optional[_Tensor]],
    add: bool,
) -> None: ...
def weight_gradient(grads: _Tensor, inputs: _Tensor, into: _Tensor, overwrite: bool) -> None: ...
def cuda_weight_gradient(
    place: _Place, grads: _Tensor, inputs: _Tensor, into: _Tensor, overwrite: bool, scratch: Tuple[int, int]
) -> None: ...
def cuda_weight_gradient_bytes(ordinal: int) -> int: ...
def describe_by_table(tensor: type, parameter: type) -> bool: ...
def keep_stream(ordinal: int, raw: int) -> None: ...
def share_threads() -> None: ...
def info() -> str: ...
def before_fork() -> None: ...
def after_fork_in_parent() -> None: ...
def after_fork() -> None: ...
