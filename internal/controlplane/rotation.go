package controlplane

import (
	"fmt"
	"slices"
	"strings"
	"time"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// The certificate authority of a cluster is rotated in three phases (docs/certificates.md): everything trusts
// the new one, everything is signed by the new one, nothing trusts the old one. The secret <cluster>-ca says what all
// of the cluster is to have, and an annotation of the control plane what it is known to have. As long as the two
// differ, everything is brought to what the secret says: control plane machines by a rollout, which is how a
// private key reaches a machine, all other machines in place. When they are the same, and nothing but then, the secret
// takes the next step. So there is nothing else to remember: whoever ends in the middle goes on from there.

// rotation is all that decides about the next step. It is data alone.
type rotation struct {
	// secret are the authorities, by fingerprint, that the secret has; the first one signs. next says that
	// there is a new one whose turn to sign comes next.
	secret []string
	next   bool
	// owned says that Capstan made the authority. One of the user's is never changed.
	owned bool
	// everywhere are those that all of the cluster is known to have; none when nobody has looked yet.
	everywhere []string
	// made is when the one that signs was made, and after the spec's rotateCAAfter.
	made, after time.Time
	// lacking says who does not have what the secret says.
	lacking []string
}

// rotationStep is what to do next about the certificate authority.
type rotationStep string

const (
	// rotationRests: nothing, or somebody else has to do something first.
	rotationRests rotationStep = ""
	// rotationSettles: all of the cluster has what the secret says, which is to be written down.
	rotationSettles rotationStep = "Settle"
	// rotationBegins: a new authority is made, and trusted.
	rotationBegins rotationStep = "Begin"
	// rotationSigns: the new authority signs.
	rotationSigns rotationStep = "Sign"
	// rotationDrops: the old authority is not trusted any more.
	rotationDrops rotationStep = "Drop"
)

// underway says that the cluster does not have, or does not keep, the authorities that it is known to have. A
// user's authority may well have its own authority behind it from the beginning.
func (r rotation) underway() bool {
	return r.owned && len(r.secret) > 1 || len(r.everywhere) > 0 && !r.settled()
}

// settled says that all of the cluster has what the secret says.
func (r rotation) settled() bool { return slices.Equal(r.everywhere, r.secret) }

// due says that the spec wants another authority than the one that signs.
func (r rotation) due(now time.Time) bool {
	return !r.after.IsZero() && !now.Before(r.after) && r.made.Before(r.after)
}

// step is the next one.
func (r rotation) step(now time.Time) rotationStep {
	switch {
	case len(r.secret) == 0:
		return rotationRests
	case len(r.everywhere) == 0 && !r.underway():
		return rotationSettles // A cluster that has never rotated has what its secret says.
	case !r.settled():
		if len(r.lacking) > 0 {
			return rotationRests
		}
		return rotationSettles
	case !r.owned:
		return rotationRests
	case r.next:
		return rotationSigns
	case len(r.secret) > 1:
		return rotationDrops
	case r.due(now):
		return rotationBegins
	}
	return rotationRests
}

// describe is the reason and the message of the condition.
func (r rotation) describe(now time.Time) (rotating bool, reason, message string) {
	switch {
	case !r.underway() && !r.owned && r.due(now):
		return false, controlplanev1.AuthorityNotOwnedReason,
			"The certificate authority is yours, and is not replaced: put a new one into its secret in the three steps of docs/certificates.md, or take spec.certificates.rotateCAAfter away"
	case !r.underway() && len(r.secret) > 1:
		return false, controlplanev1.NotRotatingReason, fmt.Sprintf("All of the cluster trusts the %d certificate authorities in the secret, and is signed by the first", len(r.secret))
	case !r.underway():
		return false, controlplanev1.NotRotatingReason, ""
	case len(r.secret) == 1:
		reason, message = controlplanev1.DroppingOldReason, "The old certificate authority ceases to be trusted"
	case r.next || len(r.everywhere) == 1:
		reason, message = controlplanev1.TrustingNewReason, "Everything comes to trust the new certificate authority"
	default:
		reason, message = controlplanev1.SigningNewReason, "Everything is signed by the new certificate authority"
	}
	if len(r.lacking) > 0 {
		message += ". The next step waits:\n* " + strings.Join(shorten(r.lacking), "\n* ")
	}
	return true, reason, message
}

// shorten a list for a condition.
func shorten(list []string) []string {
	const most = 6
	if len(list) <= most {
		return list
	}
	return append(slices.Clone(list[:most]), fmt.Sprintf("and %d more", len(list)-most))
}

// unsafeAuthorities says why the cluster cannot go from the authorities that it has to those in a secret; "" when it
// can: what signs then has to be trusted now, and what signs now has to be trusted then.
func unsafeAuthorities(secretName string, everywhere, secret []string) string {
	switch {
	case len(everywhere) == 0 || len(secret) == 0:
		return ""
	case !slices.Contains(everywhere, secret[0]):
		return fmt.Sprintf("the secret %s has a certificate authority in the first place of tls.crt that nothing in the cluster trusts yet (%s): put it behind the one that signs now (%s), with the key of that one, and wait until CertificateAuthorityRotating says that all of the cluster trusts both", secretName, secret[0], everywhere[0])
	case !slices.Contains(secret, everywhere[0]):
		return fmt.Sprintf("tls.crt in the secret %s lacks the certificate authority that signs now (%s): put it behind the new one, and wait until CertificateAuthorityRotating says that everything is signed by that", secretName, everywhere[0])
	}
	return ""
}

// holder is a machine and what is known of its certificate authorities.
type holder struct {
	name string
	// trusted are those that it trusts, by fingerprint, and signer the one that has signed its kubelet's certificates.
	// None when it does not tell.
	trusted []string
	signer  string
}

// lackingMachines are the Machines, by the bootstrap data that they were or will be made with, that have not
// exactly what the secret says.
func lackingMachines(secret []string, machines []holder, format string) []string {
	var out []string
	for _, m := range machines {
		if !slices.Equal(m.trusted, secret) {
			out = append(out, fmt.Sprintf(format, m.name))
		}
	}
	return out
}

// lackingNodes are the Nodes whose machines have not said that they have what the secret says.
func lackingNodes(secret []string, nodes []holder) []string {
	var out []string
	for _, n := range nodes {
		switch {
		case len(n.trusted) == 0:
			out = append(out, fmt.Sprintf("Node %s does not tell what its machine trusts", n.name))
		case !slices.Equal(n.trusted, secret):
			out = append(out, fmt.Sprintf("Node %s trusts what it did before", n.name))
		case n.signer != secret[0]:
			out = append(out, fmt.Sprintf("Node %s: its kubelet's certificates are signed by the other certificate authority", n.name))
		}
	}
	return out
}

// otherAuthorities says why a control plane Machine has to be replaced; "" when it has not. A Machine whose
// bootstrap data does not exist yet gets what the secret says.
func (r rotation) otherAuthorities(dataMade bool, has []string) string {
	if !dataMade || len(r.secret) == 0 || len(has) == 0 && !r.underway() || slices.Equal(has, r.secret) {
		return ""
	}
	return "Certificate authorities are not up-to-date"
}
