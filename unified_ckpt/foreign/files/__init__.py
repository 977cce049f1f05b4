"""Opens JSON and safetensors files that other frameworks wrote."""
