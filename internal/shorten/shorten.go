// Package shorten limits the length of texts from machines, hosts and API servers, before they are stored or reported.
//
// Layer: library. Allowed imports: api.
package shorten

import "strings"

// To returns the start of a text, of at most limit bytes. The result is valid UTF-8, because protocol buffers and the API
// server refuse other texts.
func To(text string, limit int) string {
	return strings.ToValidUTF8(text[:min(len(text), limit)], "")
}

// Marked is To with an ellipsis after a text that was longer. The ellipsis is not part of the limit.
func Marked(text string, limit int) string {
	if len(text) <= limit {
		return To(text, limit)
	}
	return To(text, limit) + "…"
}

// conditionMessage is the maximum length of the message of a condition, in characters. It is that of v1beta1. The API server would refuse
// the whole status with a message of more than 32768 characters. Hosts and workload clusters are the sources of many messages.
const conditionMessage = 10240

// ConditionMessage returns the message of a condition, of at most 10240 characters. The last one is an ellipsis if the message was longer.
func ConditionMessage(message string) string {
	if characters := []rune(message); len(characters) > conditionMessage {
		return string(characters[:conditionMessage-1]) + "…"
	}
	return message
}
