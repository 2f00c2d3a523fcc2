"""Readers of raw artefacts: one file per kind. They turn bytes into numbers and judge nothing."""
