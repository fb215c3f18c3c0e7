"""The attributes of Relay's operators: names, kinds and defaults, as in TVM 0.19's `relay/attrs`.

A row reads `field:kind=default`; a field without a default must be given. The kinds are those of the C++ structures,
because the JSON of TVM depends on them: an `int`, `double`, `bool`, `string` or `DataType` is stored in place, an
`Integer`, `Array` or object as the number of another node (a string may be either: it changed between versions).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .json_graph import JsonGraph, number

__all__ = ["REQUIRED", "Attribute", "attribute_class", "check_attributes", "decode_attributes"]

REQUIRED = object()
_MAX_DEPTH = 3


@dataclass(frozen=True)
class Attribute:
    """One field: its kind, and its default (`REQUIRED` when there is none)."""

    kind: str
    default: Any


def _convolution(rank: int, spatial: str, transpose: bool = False) -> str:
    ones, zeros = str([1] * rank).replace(" ", ""), str([0] * rank).replace(" ", "")
    extra = f" output_padding:Array={zeros}" if transpose else ""
    return (
        f"strides:Array={ones} padding:Array={zeros} dilation:Array={ones} groups:int=1 channels:Integer=None "
        f"kernel_size:Array=None data_layout:string=NC{spatial} kernel_layout:string={'IO' if transpose else 'OI'}"
        f"{spatial} out_layout:string= out_dtype:DataType=None{extra}"
    )


def _pool(rank: int, spatial: str, average: bool = False) -> str:
    ones, zeros = str([1] * rank).replace(" ", ""), str([0] * rank).replace(" ", "")
    extra = " count_include_pad:bool=false" if average else ""
    return (
        f"pool_size:Array strides:Array={ones} dilation:Array={ones} padding:Array={zeros} "
        f"layout:string=NC{spatial} out_layout:string= ceil_mode:bool=false{extra}"
    )


def _resize(spatial: str) -> str:
    return (
        f"size:Array=None roi:Array=None layout:string=NC{spatial} method:string=linear "
        "coordinate_transformation_mode:string=half_pixel rounding_method:string=round cubic_alpha:double=-0.5 "
        "cubic_exclude:int=0 extrapolation_value:double=0 out_dtype:DataType=None"
    )


_NORM = "epsilon:double=1e-5 center:bool=true scale:bool=true"
_QUANTIZED_AXIS = "axis:int=-1"

_ROWS = {
    # nn
    "Conv1DAttrs": _convolution(1, "W"),
    "Conv2DAttrs": _convolution(2, "HW"),
    "Conv3DAttrs": _convolution(3, "DHW"),
    "Conv1DTransposeAttrs": _convolution(1, "W", transpose=True),
    "Conv2DTransposeAttrs": _convolution(2, "HW", transpose=True),
    "Conv3DTransposeAttrs": _convolution(3, "DHW", transpose=True),
    "MaxPool1DAttrs": _pool(1, "W"),
    "MaxPool2DAttrs": _pool(2, "HW"),
    "MaxPool3DAttrs": _pool(3, "DHW"),
    "AvgPool1DAttrs": _pool(1, "W", average=True),
    "AvgPool2DAttrs": _pool(2, "HW", average=True),
    "AvgPool3DAttrs": _pool(3, "DHW", average=True),
    "GlobalPool2DAttrs": "layout:string=NCHW out_layout:string=",
    "AdaptivePool1DAttrs": "output_size:Array=[] layout:string=NCW out_layout:string=",
    "AdaptivePool2DAttrs": "output_size:Array=[] layout:string=NCHW out_layout:string=",
    "AdaptivePool3DAttrs": "output_size:Array=[] layout:string=NCDHW out_layout:string=",
    "BiasAddAttrs": "axis:int=1",
    "MatmulAttrs": "units:Integer=None out_dtype:DataType=None transpose_a:bool=false transpose_b:bool=false",
    "DenseAttrs": "units:Integer=None out_dtype:DataType=None auto_scheduler_rewritten_layout:string= "
    "meta_schedule_original_shape:Array=None",
    "DensePackAttrs": "units:Integer=None out_dtype:DataType=None weight_layout:string=NC",
    "BatchMatmulAttrs": "out_dtype:DataType=None transpose_a:bool=false transpose_b:bool=false "
    "auto_scheduler_rewritten_layout:string= meta_schedule_original_shape:Array=None",
    "SoftmaxAttrs": "axis:int=-1",
    "LeakyReluAttrs": "alpha:double=0.25",
    "PReluAttrs": "axis:int=1",
    "DropoutAttrs": "rate:double=0.5",
    "BatchNormAttrs": f"axis:int=1 {_NORM}",
    "InstanceNormAttrs": f"axis:int=1 {_NORM}",
    "LayerNormAttrs": f"axis:int=-1 {_NORM}",
    "GroupNormAttrs": f"num_groups:int=0 axis:int=1 {_NORM}",
    "LRNAttrs": "size:int=5 axis:int=1 bias:double=2 alpha:double=0.0001 beta:double=0.75",
    "L2NormalizeAttrs": "eps:double axis:Array=None",
    "PadAttrs": "pad_width:Array=None pad_mode:string=constant",
    "MirrorPadAttrs": "mode:string=SYMMETRIC pad_width:Array",
    "UpSamplingAttrs": "scale_h:double=0 scale_w:double=0 layout:string=NCHW method:string=nearest_neighbor "
    "align_corners:bool=false",
    "UpSampling3DAttrs": "scale_d:double=0 scale_h:double=0 scale_w:double=0 layout:string=NCDHW "
    "method:string=nearest_neighbor coordinate_transformation_mode:string=half_pixel",
    "SubPixelAttrs": "block_size:int=1 layout:string=NCHW mode:string=DCR",
    "SpaceToBatchNDAttrs": "block_shape:Array=[1,1] paddings:Array pad_value:double=0",
    "BatchToSpaceNDAttrs": "block_shape:Array=[1,1] crops:Array",
    "NLLLossAttrs": "reduction:string=mean ignore_index:int=-100",
    # reductions, sorting
    "ReduceAttrs": "axis:Array=None keepdims:bool=false exclude:bool=false",
    "ArgReduceAttrs": "axis:Array=None keepdims:bool=false select_last_index:bool=false exclude:bool=false",
    "VarianceAttrs": "axis:Array=None keepdims:bool=false exclude:bool=false unbiased:bool=false",
    "ArgsortAttrs": "axis:int=-1 is_ascend:bool=true dtype:DataType=None",
    "TopkAttrs": "k:Integer=None axis:int=-1 ret_type:string=both is_ascend:bool=false dtype:DataType=None",
    "ScanopAttrs": "axis:Integer=None dtype:DataType=None exclusive:Bool=false",
    # shapes and indexing
    "CastAttrs": "dtype:DataType",
    "ExpandDimsAttrs": "axis:int num_newaxis:int=1",
    "DynExpandDimsAttrs": "num_newaxis:int=1",
    "ConcatenateAttrs": "axis:int=0",
    "TransposeAttrs": "axes:Array=None",
    "ReshapeAttrs": "newshape:Array=None allowzero:bool=false reverse:bool=false",
    "ReshapeLikeAttrs": "lhs_begin:int=0 lhs_end:Integer=None rhs_begin:int=0 rhs_end:Integer=None",
    "ScatterElementsAttrs": "axis:Integer=0 reduction:string=update",
    "ScatterAttrs": "axis:Integer=0",
    "ScatterAddAttrs": "axis:Integer=0",
    "ScatterNDAttrs": "mode:string=update",
    "GatherAttrs": "axis:Integer=0",
    "GatherNDAttrs": "batch_dims:Integer=0 index_rank:Integer=None",
    "TakeAttrs": "batch_dims:Integer=0 axis:Integer=None mode:string=clip",
    "InitOpAttrs": "shape:Array=None dtype:DataType=None",
    "ArangeAttrs": "start:any=None stop:any=None step:any=None dtype:DataType=None",
    "MeshgridAttrs": "indexing:string=ij",
    "StackAttrs": "axis:Integer=0",
    "RepeatAttrs": "repeats:Integer axis:Integer=None",
    "TileAttrs": "reps:Array=None",
    "ReverseAttrs": "axis:Integer=None",
    "ReverseSequenceAttrs": "seq_axis:Integer=1 batch_axis:Integer=0",
    "SqueezeAttrs": "axis:Array=None",
    "SplitAttrs": "indices_or_sections:any axis:int=0",
    "StridedSliceAttrs": "begin:Array=None end:Array=None strides:Array=None slice_mode:string=end axes:Array=None",
    "SliceLikeAttrs": "axes:Array=None",
    "ClipAttrs": "a_min:double a_max:double",
    "FixedPointMultiplyAttrs": "multiplier:int shift:int",
    "LayoutTransformAttrs": "src_layout:string dst_layout:string",
    "ShapeOfAttrs": "dtype:DataType=None",
    "NdarraySizeAttrs": "dtype:DataType=None",
    "SequenceMaskAttrs": "mask_value:double=0 axis:int=0",
    "OneHotAttrs": "depth:int=1 axis:int=-1 dtype:DataType=None",
    "SearchSortedAttrs": "right:bool=false dtype:DataType=int32",
    "MatrixSetDiagAttrs": "k1:int=0 k2:int=0 super_diag_right_align:bool=true sub_diag_right_align:bool=false",
    "SparseToDenseAttrs": "output_shape:Array",
    "ReshapeTensorAttrs": "newshape:Array=None",
    "EinsumAttrs": "equation:string",
    "TriluAttrs": "upper:bool=true",
    # images and detection
    "Resize1DAttrs": _resize("W"),
    "Resize2DAttrs": _resize("HW"),
    "Resize3DAttrs": _resize("DHW"),
    "GridSampleAttrs": "method:string=bilinear layout:string=NCHW padding_mode:string=zeros align_corners:bool=true",
    "AffineGridAttrs": "target_shape:Array=None",
    "ROIAlignAttrs": "pooled_size:Array spatial_scale:double sample_ratio:int=-1 layout:string=NCHW mode:string=avg",
    "ROIPoolAttrs": "pooled_size:Array spatial_scale:double layout:string=NCHW",
    "NonMaximumSuppressionAttrs": "force_suppress:bool=false top_k:int=-1 coord_start:int=2 score_index:int=1 "
    "id_index:int=0 return_indices:bool=true invalid_to_bottom:bool=false",
    "GetValidCountsAttrs": "score_threshold:any=None id_index:int=0 score_index:int=1",
    # quantized
    "QuantizeAttrs": f"out_dtype:DataType=int8 {_QUANTIZED_AXIS}",
    "DequantizeAttrs": f"out_dtype:DataType=float32 {_QUANTIZED_AXIS}",
    "RequantizeAttrs": f"{_QUANTIZED_AXIS} rounding:string=None compute_dtype:string=None out_dtype:DataType=int8",
    "BroadcastAttrs": "lhs_axis:int=-1 rhs_axis:int=-1",
    # what only marks or places code
    "CompilerAttrs": "compiler:string=",
    "OnDeviceAttrs": "virtual_device:any=None constrain_result:bool=false constrain_body:bool=true "
    "device_type:int=0 is_fixed:bool=false",
    "DeviceCopyAttrs": "src_virtual_device:any=None dst_virtual_device:any=None src_dev_type:int=0 dst_dev_type:int=0",
    "CastHintAttrs": "dtype:DataType",
    "": "",
}


def _default(kind: str, text: str) -> Any:
    if text == "None" and kind != "string":
        return None
    if kind in ("string", "DataType"):
        return text
    if kind == "double":
        return float(text)
    return json.loads(text)


def _parse(row: str) -> dict[str, Attribute]:
    fields = {}
    for entry in row.split():
        name, _, rest = entry.partition(":")
        kind, given, default = rest.partition("=")
        fields[name] = Attribute(kind, _default(kind, default) if given else REQUIRED)
    return fields


_CLASSES: dict[str, dict[str, Attribute]] = {name: _parse(row) for name, row in _ROWS.items()}


def attribute_class(name: str) -> Mapping[str, Attribute] | None:
    """The fields of a class by its name or type key ("relay.attrs.Conv2DAttrs"); None when it is unknown."""
    return _CLASSES.get(name.rpartition(".")[2])


def decode_attributes(graph: JsonGraph, index: int) -> dict[str, Any]:
    """The attributes in a JSON node; of a class that is not known, its name alone, which `check_attributes` refuses."""
    fields = attribute_class(graph.type_key(index))
    if fields is None:
        return {"attrs_type_key": graph.type_key(index)}
    values = {}
    for name, attribute in fields.items():
        text = graph.field(index, name)
        if text is not None:
            values[name] = _decode(graph, index, name, attribute.kind, text)
    return values


def _decode(graph: JsonGraph, index: int, name: str, kind: str, text: str) -> Any:
    if kind in ("int", "bool", "double"):
        return number(text)
    if kind == "DataType":
        return text
    if kind == "string":
        is_node = text.isdigit() and len(text) < 10
        return graph.value(graph.child(index, name)) if is_node else text
    value = graph.value(graph.child(index, name))
    return value if kind != "Bool" or value is None else bool(value)


def check_attributes(operator: str, class_name: str, given: Mapping[str, Any]) -> SimpleNamespace:
    """All attributes of a call, defaults included, with the kinds that the class declares.

    Raises
    ------
    ValueError
        One is unknown, missing, or of another kind.
    """
    fields = _CLASSES[class_name]
    if attribute_class(str(given.get("attrs_type_key", ""))) is None:
        raise ValueError(f"{operator} has attributes of the class {given['attrs_type_key']}, expected {class_name}")
    for name in given:
        if name not in fields and name != "attrs_type_key":
            known = ", ".join(fields) or "none"
            raise ValueError(f"{operator} has no attribute {name!r}; it has: {known}")
    values = {}
    for name, attribute in fields.items():
        value = given.get(name, attribute.default)
        if value is REQUIRED:
            raise ValueError(f"{operator} needs the attribute {name}")
        values[name] = _checked(operator, name, attribute, value)
    return SimpleNamespace(**values)


def _checked(operator: str, name: str, attribute: Attribute, value: Any) -> Any:
    kind = attribute.kind
    if kind == "any" or value is None:
        if value is None and attribute.default not in (None, REQUIRED):
            return attribute.default
        return value
    if kind in ("int", "Integer") and isinstance(value, int):
        return int(value)
    if kind in ("bool", "Bool") and value in (0, 1):
        return bool(value)
    if kind == "double" and isinstance(value, int | float):
        return float(value)
    if kind in ("string", "DataType") and isinstance(value, str):
        # DataType() prints as "" or "void", or "handle" in old versions: not given.
        return None if kind == "DataType" and value in ("", "void", "handle") else value
    if kind == "Array":
        values = value if isinstance(value, list) else [value]
        if _is_numbers(values, 0):
            return values
    raise ValueError(f"the attribute {name} of {operator} is {value!r}, expected {_WORDS[kind]}")


_WORDS = {
    "int": "a whole number",
    "Integer": "a whole number",
    "bool": "True or False",
    "Bool": "True or False",
    "double": "a number",
    "string": "text in quotation marks",
    "DataType": 'a dtype in quotation marks, as in "float32"',
    "Array": "a list of numbers, as in [1, 1]",
}


def _is_numbers(values: list[Any], depth: int) -> bool:
    return depth < _MAX_DEPTH and all(
        _is_numbers(value, depth + 1) if isinstance(value, list) else isinstance(value, int | float) for value in values
    )
