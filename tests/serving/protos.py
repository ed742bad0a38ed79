"""The messages of TensorFlow Serving that the tests read, as in its prediction_log.proto, predict.proto, model.proto.

TensorProtos are left as bytes, which they are on the wire.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELDS = {
    "ModelSpec": [(1, "name", "string"), (3, "signature_name", "string")],
    "InputsEntry": [(1, "key", "string"), (2, "value", "bytes")],  # a map is a repeated message of these
    "PredictRequest": [(1, "model_spec", "ModelSpec"), (2, "inputs", "*InputsEntry")],
    "PredictLog": [(1, "request", "PredictRequest")],
    "PredictionLog": [(6, "predict_log", "PredictLog")],
    # session_bundle_config.proto
    "Int64Value": [(1, "value", "int64")],
    "StringValue": [(1, "value", "string")],
    "BatchingParameters": [
        (1, "max_batch_size", "Int64Value"),
        (2, "batch_timeout_micros", "Int64Value"),
        (3, "max_enqueued_batches", "Int64Value"),
        (4, "num_batch_threads", "Int64Value"),
        (5, "thread_pool_name", "StringValue"),
        (7, "pad_variable_length_inputs", "bool"),
    ],
    # monitoring_config.proto
    "PrometheusConfig": [(1, "enable", "bool"), (2, "path", "string")],
    "MonitoringConfig": [(1, "prometheus_config", "PrometheusConfig")],
}


def message(name):
    """The class of a message."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="serving.proto", package="tensorflow.serving", syntax="proto3")
    for one, fields in FIELDS.items():
        described = file.message_type.add(name=one)
        for number, field, kind in fields:
            repeated, kind = kind.startswith("*"), kind.lstrip("*")
            is_message = kind in FIELDS
            described.field.add(
                name=field,
                number=number,
                label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL,
                type=kinds.TYPE_MESSAGE if is_message else getattr(kinds, f"TYPE_{kind.upper()}"),
                type_name=f".tensorflow.serving.{kind}" if is_message else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.serving.{name}"))
