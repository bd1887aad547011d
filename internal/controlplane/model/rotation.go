package model

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
)

// The certificate authority of a cluster is rotated in three phases (docs/certificates.md): every machine trusts the new
// authority, every certificate is signed by the new authority, no machine trusts the old authority. The Secret <cluster>-ca
// holds the target, and an annotation of the control plane holds the authorities that the cluster is known to have. While the
// two differ, the cluster is brought to the target: control plane machines by a rollout, because in this way a private key
// reaches a machine, and all other machines in place. The Secret takes the next step only when the two are equal. No other record
// is necessary, and after a crash the next process continues at the same step.

// NextCertName and NextKeyName are the keys, in the Secret <cluster>-ca, of the authority that signs next.
const (
	NextCertName = "next.crt"
	NextKeyName  = "next.key"
)

// Rotation is the input of the decision about the next step.
type Rotation struct {
	// Target are the fingerprints of the authorities in the Secret; the first one signs. next: the Secret has an authority
	// that signs next.
	Target []string
	next   bool
	// owned: Capstan created the authority. An authority of the user is never changed.
	owned bool
	// Established are the authorities that the whole cluster is known to have; empty before the first look.
	Established []string
	// made is the creation time of the authority that signs, and After is rotateCAAfter of the spec.
	made, After time.Time
	// Pending describes the machines that do not have the target yet.
	Pending []string
}

// RotationStep is the next step about the certificate authority.
type RotationStep string

// Steps of a rotation, in their order.
const (
	// RotationIdle: nothing to do, or something else has to happen first.
	RotationIdle RotationStep = ""
	// RotationRecord: the whole cluster has the target, which has to be recorded.
	RotationRecord RotationStep = "Settle"
	// RotationTrustNew: a new authority is created and trusted.
	RotationTrustNew RotationStep = "Begin"
	// RotationSignNew: the new authority signs.
	RotationSignNew RotationStep = "Sign"
	// RotationDropOld: the old authority is not trusted any more.
	RotationDropOld RotationStep = "Drop"
)

// Underway reports whether the cluster does not have, or will not keep, the recorded authorities. The Secret of a user may
// have several authorities from the start.
func (r Rotation) Underway() bool {
	return r.owned && len(r.Target) > 1 || len(r.Established) > 0 && !r.Settled()
}

// Settled reports whether the whole cluster has the target.
func (r Rotation) Settled() bool { return slices.Equal(r.Established, r.Target) }

// due reports whether the spec demands another authority than the one that signs.
func (r Rotation) due(now time.Time) bool {
	return !r.After.IsZero() && !now.Before(r.After) && r.made.Before(r.After)
}

// Step returns the next step.
func (r Rotation) Step(now time.Time) RotationStep {
	switch {
	case len(r.Target) == 0:
		return RotationIdle
	case len(r.Established) == 0 && !r.Underway():
		return RotationRecord // A cluster without a rotation has the authorities of its Secret.
	case !r.Settled():
		if len(r.Pending) > 0 {
			return RotationIdle
		}
		return RotationRecord
	case !r.owned:
		return RotationIdle
	case r.next:
		return RotationSignNew
	case len(r.Target) > 1:
		return RotationDropOld
	case r.due(now):
		return RotationTrustNew
	}
	return RotationIdle
}

// Describe returns the reason and the message of the condition.
func (r Rotation) Describe(now time.Time) (rotating bool, reason, message string) {
	switch {
	case !r.Underway() && !r.owned && r.due(now):
		return false, controlplanev1.AuthorityNotOwnedReason,
			"The certificate authority is provided by the user and is not replaced: add a new one to its Secret in the three steps of docs/certificates.md, or remove spec.certificates.rotateCAAfter"
	case !r.Underway() && len(r.Target) > 1:
		return false, controlplanev1.NotRotatingReason, fmt.Sprintf("All of the cluster trusts the %d certificate authorities in the Secret, and is signed by the first", len(r.Target))
	case !r.Underway():
		return false, controlplanev1.NotRotatingReason, ""
	case len(r.Target) == 1:
		reason, message = controlplanev1.DroppingOldReason, "The old certificate authority is being removed"
	case r.next || len(r.Established) == 1:
		reason, message = controlplanev1.TrustingNewReason, "The machines are being configured to trust the new certificate authority"
	default:
		reason, message = controlplanev1.SigningNewReason, "The certificates are being signed by the new certificate authority"
	}
	if len(r.Pending) > 0 {
		message += ". The next step waits:\n* " + strings.Join(Shorten(r.Pending), "\n* ")
	}
	return true, reason, message
}

// Shorten limits the length of a list in a condition.
func Shorten(list []string) []string {
	const most = 6
	if len(list) <= most {
		return list
	}
	return append(slices.Clone(list[:most]), fmt.Sprintf("and %d more", len(list)-most))
}

// CannotChangeAuthorities returns the reason why the cluster cannot go from its authorities to those of a Secret; "" when it
// can. The next signer must be trusted now, and the present signer must be trusted then.
func CannotChangeAuthorities(secretName string, everywhere, secret []string) string {
	switch {
	case len(everywhere) == 0 || len(secret) == 0:
		return ""
	case !slices.Contains(everywhere, secret[0]):
		return fmt.Sprintf("the first certificate authority in tls.crt of the Secret %s is one that no machine trusts yet (%s): put it behind the current signing authority (%s), use the key of the current one, and wait until CertificateAuthorityRotating reports that all machines trust both", secretName, secret[0], everywhere[0])
	case !slices.Contains(secret, everywhere[0]):
		return fmt.Sprintf("tls.crt in the Secret %s lacks the current signing authority (%s): put it behind the new one, and wait until CertificateAuthorityRotating reports that the new authority has signed all certificates", secretName, everywhere[0])
	}
	return ""
}

// TrustHolder is a machine and its known certificate authorities.
type TrustHolder struct {
	Name string
	// Trusted are the fingerprints of the authorities that it trusts, and Signer is the authority that signed the
	// certificates of its kubelet. Empty when the machine does not report them.
	Trusted []string
	Signer  string
}

// PendingMachines describes the Machines whose bootstrap data does not have exactly the target.
func PendingMachines(secret []string, machines []TrustHolder, format string) []string {
	var out []string
	for _, m := range machines {
		if !slices.Equal(m.Trusted, secret) {
			out = append(out, fmt.Sprintf(format, m.Name))
		}
	}
	return out
}

// PendingNodes describes the Nodes whose machines have not reported the target.
func PendingNodes(secret []string, nodes []TrustHolder) []string {
	var out []string
	for _, n := range nodes {
		switch {
		case len(n.Trusted) == 0:
			out = append(out, fmt.Sprintf("Node %s does not report the authorities that its machine trusts", n.Name))
		case !slices.Equal(n.Trusted, secret):
			out = append(out, fmt.Sprintf("Node %s trusts the former authorities", n.Name))
		case n.Signer != secret[0]:
			out = append(out, fmt.Sprintf("the kubelet certificates of Node %s are signed by the other certificate authority", n.Name))
		}
	}
	return out
}

// OtherAuthorities returns the change to other certificate authorities, which only new Machines have; nil without one. A Machine
// without bootstrap data will get the target.
func (r Rotation) OtherAuthorities(dataMade bool, has []string) *inplace.Change {
	if !dataMade || len(r.Target) == 0 || len(has) == 0 && !r.Underway() || slices.Equal(has, r.Target) {
		return nil
	}
	return ptr.To(replacedBy("spec.certificates.rotateCAAfter", "Certificate authorities are not up-to-date"))
}

// OtherEtcdCertificates returns the change to other certificates of an external etcd, which only new Machines have; nil without one.
// Both are lists of fingerprints, whose order does not matter. Bootstrap data of older versions of Capstan does not record them. newer: the
// data was deleted, and the client certificate is newer than the Machine.
func OtherEtcdCertificates(has, target string, newer bool) *inplace.Change {
	sorted := func(list string) []string { return slices.Sorted(slices.Values(SplitFingerprints(list))) }
	if target == "" || !newer && (has == "" || slices.Equal(sorted(has), sorted(target))) {
		return nil
	}
	return ptr.To(replacedBy("spec.config.cluster.etcd.external", "Certificates of the external etcd are not up-to-date"))
}

// Rotation returns the state of the certificate authority without a look at the workload cluster.
func (cp *ControlPlane) Rotation() Rotation {
	out := Rotation{
		Established: SplitFingerprints(cp.Object.Annotations[controlplanev1.AuthoritiesAnnotation]),
		After:       cp.Object.Spec.Certificates.RotateCAAfter.Time,
	}
	if cp.Authority == nil {
		return out
	}
	bundle := cp.Authority.Data[secret.TLSCrtDataName]
	out.Target, _ = nodeconfig.Fingerprints(bundle) // checkCertificate reports invalid ones.
	out.owned = metav1.IsControlledBy(cp.Authority, cp.Object)
	out.next = len(cp.Authority.Data[NextKeyName]) > 0
	if cert, err := certs.DecodeCertPEM(bundle); err == nil && cert != nil {
		out.made = cert.NotBefore.Add(pki.Backdate)
	}
	return out
}

// SplitFingerprints reads the value of AuthoritiesAnnotation: fingerprints separated by commas. An empty value has none.
func SplitFingerprints(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

// WithPending returns the rotation with the descriptions of the machines that lack the target. They are ignored once the
// whole cluster has it.
func (r Rotation) WithPending(lacking []string) Rotation {
	if !r.Settled() {
		r.Pending = lacking
	}
	return r
}
