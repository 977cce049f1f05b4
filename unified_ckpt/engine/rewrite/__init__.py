"""A Source into a new folder: conversion and merge. Knows nothing of live state."""
