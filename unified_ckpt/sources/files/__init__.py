"""Opens JSON and safetensors files that other frameworks wrote; does not interpret tensor names."""
