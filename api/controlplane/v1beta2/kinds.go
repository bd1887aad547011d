package v1beta2

// Kinds of this API group.
const (
	ControlPlaneKind         = "CapstanControlPlane"
	ControlPlaneTemplateKind = "CapstanControlPlaneTemplate"
)
