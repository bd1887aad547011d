package v1beta2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Pool is the common interface of both kinds of pool, so that the same code serves both.
// +kubebuilder:object:generate=false
type Pool interface {
	metav1.Object
	runtime.Object
	// PoolKind is the kind's name, also when the type's own metadata is empty,
	// as it is in objects from a typed client.
	PoolKind() string
	PoolSpec() *CapstanIPPoolSpec
	PoolStatus() *CapstanIPPoolStatus
	// PoolAllowedNamespaces selects the namespaces whose claims the pool
	// serves. Nil is all that can name it.
	PoolAllowedNamespaces() *AllowedNamespaces
	GetConditions() []metav1.Condition
	SetConditions([]metav1.Condition)
}

var (
	_ Pool = &CapstanIPPool{}
	_ Pool = &GlobalCapstanIPPool{}
)

// PoolKind implements Pool.
func (p *CapstanIPPool) PoolKind() string { return CapstanIPPoolKind }

// PoolSpec implements Pool.
func (p *CapstanIPPool) PoolSpec() *CapstanIPPoolSpec { return &p.Spec }

// PoolStatus implements Pool.
func (p *CapstanIPPool) PoolStatus() *CapstanIPPoolStatus { return &p.Status }

// PoolAllowedNamespaces implements Pool: only claims of its own namespace can
// name it.
func (p *CapstanIPPool) PoolAllowedNamespaces() *AllowedNamespaces { return nil }

// GetConditions returns the conditions of the pool.
func (p *CapstanIPPool) GetConditions() []metav1.Condition { return p.Status.Conditions }

// SetConditions replaces the conditions of the pool.
func (p *CapstanIPPool) SetConditions(c []metav1.Condition) { p.Status.Conditions = c }

// PoolKind implements Pool.
func (p *GlobalCapstanIPPool) PoolKind() string { return GlobalCapstanIPPoolKind }

// PoolSpec implements Pool.
func (p *GlobalCapstanIPPool) PoolSpec() *CapstanIPPoolSpec { return &p.Spec.CapstanIPPoolSpec }

// PoolStatus implements Pool.
func (p *GlobalCapstanIPPool) PoolStatus() *CapstanIPPoolStatus { return &p.Status }

// PoolAllowedNamespaces implements Pool.
func (p *GlobalCapstanIPPool) PoolAllowedNamespaces() *AllowedNamespaces {
	return p.Spec.AllowedNamespaces
}

// GetConditions returns the conditions of the pool.
func (p *GlobalCapstanIPPool) GetConditions() []metav1.Condition { return p.Status.Conditions }

// SetConditions replaces the conditions of the pool.
func (p *GlobalCapstanIPPool) SetConditions(c []metav1.Condition) { p.Status.Conditions = c }
