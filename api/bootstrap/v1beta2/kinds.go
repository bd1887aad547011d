package v1beta2

// Kinds of this API group.
const (
	ConfigKind         = "CapstanConfig"
	ConfigTemplateKind = "CapstanConfigTemplate"
)
