package v1beta2

import bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"

// Manifest has objects for a new cluster.
// +kubebuilder:validation:XValidation:rule="has(self.content) != has(self.contentFrom)",message="exactly one of content and contentFrom must be set"
type Manifest struct {
	// name identifies the manifest. The cluster records the names of applied manifests.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`

	// content is a stream of YAML documents, one for each object.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=65536
	Content string `json:"content,omitempty"`

	// contentFrom is the source of the documents.
	// +optional
	ContentFrom bootstrapv1.ContentSource `json:"contentFrom,omitempty,omitzero"`
}
