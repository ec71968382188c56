"""Protobuf messages, generated from ``protos/`` by ``make protos``. Do not edit."""
