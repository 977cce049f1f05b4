"""Writes a Source into a new folder: conversion and merge."""
